"""Random damage to checkpoints, ours and stock Orbax's: an error of this package or the values that were saved."""

import collections
import json
import subprocess

import pytest

import faults
from tests.faults import mutants
from tests.faults.sizes import SEED, SIZES

RUN = """
import pathlib, sys
from tests.faults.mutants import main
main(pathlib.Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
"""


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
    assert outcomes["right"], outcomes
    assert outcomes["CorruptCheckpointError"] > len(done) / 4, outcomes
