"""Random damage to checkpoints, ours and stock Orbax's: an error of this package or the values that were saved."""

import collections
import json
import subprocess

import pytest

import flax_rpsave as rps
from flax_rpsave import cli
from tests import faults
from tests.faults import mutants
from tests.faults.sizes import SEED, SIZES

RUN = """
import pathlib, sys
from tests.faults.mutants import main
main(pathlib.Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
"""

ENOUGH = 200
"""Mutants from which on what becomes of them is no longer chance: one in twelve is read right."""


@pytest.mark.timeout(300 + SIZES.mutants)
@pytest.mark.parametrize("layout", mutants.LAYOUTS)
def test_whatever_is_damaged_is_an_error_of_ours_or_read_right(tmp_path, layout, record_property):
    print(f"RPSAVE_SEED={SEED}")
    done, outcomes, odd = {}, collections.Counter(), []
    while len(done) < SIZES.mutants:
        (tmp_path / str(len(done))).mkdir()
        ended: subprocess.CompletedProcess = faults.run_python(
            RUN, tmp_path / str(len(done)), layout, SEED, len(done), SIZES.mutants - len(done),
            timeout=240 + SIZES.mutants,
        )  # fmt: skip
        before = len(done)
        for line in ended.stdout.splitlines():
            row = json.loads(line)
            done.setdefault(row["number"], {}).update(row)
        last = done[max(done)] if done else {}
        if "outcome" not in last:  # the process did not survive it, or hung
            assert len(done) > before, ended.stderr
            last["outcome"] = f"the interpreter ended with {ended.returncode}:\n{ended.stderr}"
    for mutant in done.values():
        outcome = mutant["outcome"]
        outcomes[outcome.splitlines()[-1] if "\n" in outcome else outcome] += 1
        wrong = mutant["defined"] and outcome == "wrong"
        missed = mutant["defined"] and mutant["verified"] == 0 and outcome != "right"
        if "\n" in outcome or wrong or missed:
            odd.append(mutant)
    record_property("mutants tried", len(done))
    assert not odd, "\n".join(json.dumps(m, indent=1).replace("\\n", "\n") for m in odd[:5]) + f"\n{outcomes}"
    assert outcomes["CorruptCheckpointError"], outcomes  # that whole ones are read right is seen before any is damaged
    if len(done) >= ENOUGH:
        assert outcomes["right"], outcomes
        assert outcomes["CorruptCheckpointError"] > len(done) / 4, outcomes


def with_own(**keys):
    return lambda document: {**document, "custom_metadata": {"flax_rpsave": keys}}


def replaced(old, new):
    return lambda document: json.loads(json.dumps(document).replace(old, new))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("_CHECKPOINT_METADATA", with_own(processes="x")),
        ("_CHECKPOINT_METADATA", with_own(processes=0.5)),
        ("_CHECKPOINT_METADATA", with_own(versions=[])),
        ("_METADATA", replaced('"count"', '"\\ud800"')),
        (
            "_METADATA",
            lambda document: json.loads(json.dumps(document).replace('"key_type": 2', '"key_type": Infinity')),
        ),
        ("params.w/zarr.json", lambda document: {**document, "shape": [2**40, 7]}),
        ("params.w/zarr.json", lambda document: {**document, "shape": [2**20, 2**20]}),
    ],
)
def test_what_a_document_of_stock_orbax_may_say_is_damage(tmp_path, file, change):
    mutants.save(tmp_path / "c", "stock files", 1)
    document = json.loads((tmp_path / "c" / file).read_text())
    changed = change(document)
    assert changed != document
    (tmp_path / "c" / file).write_text(json.dumps(changed))
    with pytest.raises(rps.CorruptCheckpointError, match=str(tmp_path / "c")):
        rps.load(tmp_path / "c")


def test_a_document_nested_without_end_is_damage(tmp_path):
    mutants.save(tmp_path / "c", "stock", 1)
    (tmp_path / "c" / "_METADATA").write_bytes(b"[" * 100_000)
    with pytest.raises(rps.CorruptCheckpointError, match="_METADATA is not a document"):
        rps.load(tmp_path / "c")


def test_a_date_that_is_none_harms_nothing(tmp_path):
    mutants.save(tmp_path / "7", "stock", 1)
    file = tmp_path / "7" / "_CHECKPOINT_METADATA"
    for date in ("x", -1, 10**30, 0.5, None):
        file.write_text(json.dumps({**json.loads(file.read_text()), "commit_timestamp_nsecs": date}))
        assert rps.load(tmp_path)["count"] == 1
        assert cli.main(["ls", str(tmp_path)]) == 0
