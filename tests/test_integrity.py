"""Whatever single thing in a step's files is changed, cut off or deleted: resume says which step, and takes another.

Bytes that nobody reads (superseded nodes of a process's own database, white space) may be changed without consequence;
what comes back is then still the state that was saved. Reports 29 and 34.
"""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import flax_rpsave as rps
from flax_rpsave import cli, documents
from tests import faults

FORMATS = {"ocdbt": True, "files": False}


class Data:
    """A data iterator whose position is a number."""

    def __init__(self, position=0):
        self.position = position

    def get_state(self):
        return {"position": self.position, "filler": "x" * 100}  # long enough not to lie in a node

    def set_state(self, state):
        assert state["filler"] == "x" * 100
        self.position = state["position"]


def state_at(step):
    replicated = jax.sharding.NamedSharding(jax.make_mesh((8,), ("data",)), jax.sharding.PartitionSpec())
    return {
        "w": jax.device_put(jnp.arange(120, dtype=jnp.int32) + step, replicated),  # three chunks
        "b": np.full(3, step, np.float64),
        "step": step,
        "note": f"step {step}",
        "none": None,
    }


def target():
    """Host values: nothing is compiled for them."""
    return {"w": np.zeros(120, np.int32), "b": np.zeros(3), "step": 0, "note": "", "none": None}


def config(root, use_ocdbt=True):
    return {
        "directory": root,
        "save_interval_steps": 10,
        "replica_parallel": {"min_slice_bytes": 160},
        "storage": {"use_ocdbt": use_ocdbt},
    }


@pytest.fixture(scope="module", params=FORMATS)
def finished_run(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param) / "run"
    data = Data()
    with rps.CheckpointCallback(config(root, FORMATS[request.param]), data=data) as checkpoint:
        for step in (10, 20):
            data.position = step
            checkpoint(step, state_at(step), metrics={"loss": 0.5}, extra={"epoch": step})
    return root


@pytest.fixture
def run(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run"


def resume(run, caplog):
    """The step that was resumed from; all that came back must be that step's, and a step passed over be named."""
    caplog.clear()
    data = Data()
    with rps.CheckpointCallback(config(run), data=data) as checkpoint:
        state, step = checkpoint.resume(target())
        assert checkpoint.extra == {"epoch": step}
    expected = state_at(step)
    assert state["w"].tolist() == np.asarray(expected["w"]).tolist()
    assert state["b"].tolist() == expected["b"].tolist()
    assert (state["step"], state["note"], state["none"], data.position) == (step, f"step {step}", None, step)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [w.startswith("step 20 is damaged and passed over: ") for w in warnings] == [True] * (step != 20)
    assert all(str(run / "20") in warning for warning in warnings)
    return step


def files_of(step):
    return [path for path in sorted(step.rglob("*")) if path.is_file()]


def is_needed(path):
    """Whether every byte of a file matters to us: all documents but the item's own marker; chunks, digests, data."""
    parts = path.parts
    if path.name == "commit_success.txt":
        return parts[-2] != "default"
    # Else values among superseded nodes, or JSON that is read for its meaning.
    return not any(part.startswith("ocdbt.process_") for part in parts) and path.name != "zarr.json"


def flipped(data, count):
    """The data with one bit changed, at `count` places spread over it, another bit at each."""
    for k, at in enumerate(sorted({round(i * (len(data) - 1) / (count - 1)) for i in range(count)})):
        changed = bytearray(data)
        changed[at] ^= 1 << k % 8
        yield at, bytes(changed)


def test_a_changed_byte_anywhere_is_found_or_means_nothing(run, caplog):
    steps = []
    for path in files_of(run / "20"):
        data = path.read_bytes()
        for at, changed in flipped(data, 16):
            path.write_bytes(changed)
            steps.append(resume(run, caplog))
            assert steps[-1] == 10 or not is_needed(path), (path, at)
        path.write_bytes(data)
    assert set(steps) == {10, 20}
    assert resume(run, caplog) == 20


def test_a_file_cut_off_anywhere_is_found_or_means_nothing(run, caplog):
    for path in files_of(run / "20"):
        data = path.read_bytes()
        for length in sorted({0, 1, len(data) // 3, len(data) // 2, len(data) - 1}):
            path.write_bytes(data[:length])
            assert resume(run, caplog) == 10 or not is_needed(path), (path, length)
        path.write_bytes(data + b"\0")
        assert resume(run, caplog) in (10, 20)
        path.write_bytes(data)
    assert resume(run, caplog) == 20


def test_a_deleted_file_is_found_or_means_nothing(run, caplog):
    for path in files_of(run / "20"):
        data = path.read_bytes()
        path.unlink()
        assert resume(run, caplog) == 10 or not is_needed(path), path
        path.write_bytes(data)
    assert resume(run, caplog) == 20


def test_files_of_one_step_in_the_place_of_anothers_are_found(run, caplog):
    """Each is whole, by itself: the digests of the others tell."""
    others = {path.relative_to(run / "10"): path for path in files_of(run / "10")}
    for path in files_of(run / "20"):
        other = others.get(path.relative_to(run / "20"))
        if other is None or other.read_bytes() == path.read_bytes():
            continue
        data = path.read_bytes()
        path.write_bytes(other.read_bytes())
        assert resume(run, caplog) == 10 or not is_needed(path), path
        path.write_bytes(data)
    assert resume(run, caplog) == 20


def two_steps(root, use_ocdbt, checksum=True):
    """A run whose steps differ in nothing but the values of an array."""
    storage = {"use_ocdbt": use_ocdbt, "checksum": checksum}
    settings = {"directory": root, "save_interval_steps": 10, "storage": storage}
    with rps.CheckpointCallback(settings) as checkpoint:
        for step in (10, 20):
            checkpoint(step, {"w": np.full(300, step, np.int32)})
    return settings


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_the_item_of_another_step_of_equal_shapes_is_found(tmp_path, use_ocdbt, checksum, caplog, capsys):
    """Each is sound by itself."""
    settings = two_steps(tmp_path, use_ocdbt, checksum)
    shutil.rmtree(tmp_path / "20" / "default")
    shutil.copytree(tmp_path / "10" / "default", tmp_path / "20" / "default")
    said = f"{tmp_path}/20/default: .rpsave/process_0/index was not committed with this step: the arrays are another's"
    assert cli.main(["verify", str(tmp_path)]) == 1
    assert f"default: {said}" in capsys.readouterr().out
    with rps.CheckpointCallback(settings) as checkpoint:
        state, step = checkpoint.resume({"w": np.zeros(300, np.int32)})
    assert (step, state["w"][0]) == (10, 10)
    assert f"step 20 is damaged and passed over: {said}" in caplog.messages
    with pytest.raises(rps.CorruptCheckpointError, match="another's"):
        rps.load(tmp_path, step=20)


def rewrite_own(step, change):
    """Changes what this package keeps in a step's document, and the digests with it."""
    document = json.loads((step / "_CHECKPOINT_METADATA").read_bytes())
    change(document["custom_metadata"]["flax_rpsave"])
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(document))
    sealed = json.loads(documents.unseal((step / "commit_success.txt").read_bytes(), "it"))
    files = {name: (step / name).read_bytes() for name in sealed}
    (step / "commit_success.txt").write_bytes(documents.build_commit(files))


def test_a_step_of_a_later_format_is_no_reason_to_take_an_older_one(tmp_path, capsys):
    settings = two_steps(tmp_path, True)
    (tmp_path / "20" / "default" / "_METADATA").write_text("of another form")
    rewrite_own(tmp_path / "20", lambda own: own.update(format=2, versions={"flax_rpsave": "9.1"}))
    said = f"{tmp_path}/20 was written in format 2, by a later version of flax_rpsave (9.1): use that; this one reads"
    with rps.CheckpointCallback(settings) as checkpoint:
        for read in (lambda: checkpoint.resume({"w": np.zeros(300, np.int32)}), lambda: rps.load(tmp_path)):
            with pytest.raises(rps.RPSaveError, match=re.escape(said)):
                read()
    assert cli.main(["verify", str(tmp_path)]) == 3
    assert said in capsys.readouterr().err


def test_a_document_that_the_marker_does_not_know_is_a_fault(tmp_path):
    """Else one that was dropped from the list, and changed, would be believed."""
    rps.save(tmp_path / "one", {"note": "as saved"})
    marker = tmp_path / "one" / "commit_success.txt"
    sealed = json.loads(documents.unseal(marker.read_bytes(), "it"))
    (name,) = [name for name in sealed if name.endswith("_strings.json")]
    del sealed[name]
    marker.write_bytes(documents.seal(json.dumps(sealed).encode()))
    with pytest.raises(rps.CorruptCheckpointError, match=f"{name} is not among the documents that were written"):
        rps.load(tmp_path / "one")
    assert cli.main(["verify", str(tmp_path / "one")]) == 1


def test_a_step_whose_document_does_not_name_its_indices_is_read_as_before(tmp_path, capsys):
    """Those of versions that did not write them."""
    settings = two_steps(tmp_path, True)
    rewrite_own(tmp_path / "20", lambda own: own.pop("indices"))
    assert cli.main(["verify", str(tmp_path)]) == 0
    assert "step 20: sound" in capsys.readouterr().out
    with rps.CheckpointCallback(settings) as checkpoint:
        state, step = checkpoint.resume({"w": np.zeros(300, np.int32)})
    assert (step, state["w"][0]) == (20, 20)


@pytest.mark.parametrize("how", ["changed", "cut off", "deleted"])
def test_where_no_step_verifies_resume_stops_and_changes_nothing(run, how):
    """Each step damaged in another file; the newest one's damage is told."""
    (run / "20" / "default" / "_METADATA").unlink()
    for path in [path for path in files_of(run / "10") if is_needed(path)]:
        data = path.read_bytes()
        if how == "deleted":
            path.unlink()
        else:
            path.write_bytes(data[:-1] if how == "cut off" else next(changed for _, changed in flipped(data, 2)))
        before = faults.files_in(run)
        with (
            rps.CheckpointCallback(config(run), data=Data()) as checkpoint,
            pytest.raises(rps.CorruptCheckpointError, match=r"has steps \[10, 20\], and none.*_METADATA"),
        ):
            checkpoint.resume(target())
        assert faults.files_in(run) == before
        path.write_bytes(data)


# Documents that stock Orbax wrote have no digests: what they say may change, but only to another error of ours.


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_a_changed_document_of_stock_orbax_raises_no_foreign_error(tmp_path, use_ocdbt):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=True)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "c", ocp.args.PyTreeSave({"w": np.arange(5.0), "l": [1, {"n": np.ones(2)}]}))
    expected = rps.load(tmp_path / "c")
    for path in files_of(tmp_path / "c"):
        data = path.read_bytes()
        for _, changed in flipped(data, 40):
            path.write_bytes(changed)
            try:
                found = rps.load(tmp_path / "c")
            except rps.CorruptCheckpointError:
                continue
            if not use_ocdbt and path.parent.name == "c":
                continue  # a chunk: without a digest, another value
            assert json.dumps(found, default=np.ndarray.tolist).count("null") == 0
        path.write_bytes(data)
    assert rps.load(tmp_path / "c")["w"].tolist() == expected["w"].tolist()
