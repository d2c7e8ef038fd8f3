"""The command line: what it lists, what it finds, its exit codes; that it reads only, and needs no device."""

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import flax_rpsave as rps
from flax_rpsave import cli
from flax_rpsave.directory import open_directory
from flax_rpsave.store import new_context
from tests import faults
from tests.helpers import free_port

FORMATS = {"ocdbt": True, "files": False}


def state_at(step):
    """Leaves of every kind; one in three chunks."""
    replicated = jax.sharding.NamedSharding(jax.make_mesh((8,), ("data",)), jax.sharding.PartitionSpec())
    return {
        "params": {"w": jax.device_put(jnp.arange(300, dtype=jnp.int32) + step, replicated)},
        "key": jax.random.key(step),
        "count": step,
        "note": f"step {step}",
        "empty": {},
    }


class Data:
    """A data iterator's place in the callback."""

    def get_state(self):
        return {"position": 7}

    def set_state(self, state):
        pass


def config(root, use_ocdbt=True, **keys):
    return {
        "directory": root,
        "save_interval_steps": 10,
        "replica_parallel": {"min_slice_bytes": 400},
        "storage": {"use_ocdbt": use_ocdbt, "checksum": keys.pop("checksum", True)},
        **keys,
    }


def train(root, *steps, **keys):
    with rps.CheckpointCallback(config(root, **keys), data=Data()) as checkpoint:
        for step in steps:
            assert checkpoint(step, state_at(step), metrics={"loss": 1 / step, "bad": float("nan")})


@pytest.fixture(scope="module", params=FORMATS)
def finished_run(request, tmp_path_factory):
    """A run with steps 10 and 20, not to be changed."""
    root = tmp_path_factory.mktemp(request.param) / "run"
    train(root, 10, 20, use_ocdbt=FORMATS[request.param])
    return root


@pytest.fixture
def run(finished_run, tmp_path):
    """A run of one's own with steps 10 and 20."""
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def command(capsys):
    """Runs the command in this process: (exit code, lines printed, lines of errors)."""

    def run(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return run


@pytest.fixture
def as_json(command):
    """What the command prints with --json, and its exit code."""

    def run(*arguments):
        code, out, err = command(*arguments, "--json")
        assert err == []
        return code, json.loads("\n".join(out), parse_constant=pytest.fail)

    return run


def flip(file, at, bit=0):
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def program(*arguments):
    """The command as a program of its own, in which no JAX backend can be made."""
    return python("-m", "flax_rpsave.cli", *arguments)


def python(*arguments):
    root = pathlib.Path(__file__).parents[1]
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "no-such-platform"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


# As a program


def test_no_backend_of_jax_is_made_and_nothing_is_written(tmp_path):
    train(tmp_path / "run", 10)
    before = faults.files_in(tmp_path)
    done = python(
        "-c",
        "import sys; from flax_rpsave.cli import main; sys.exit(sum(main([c, sys.argv[1]]) for c in sys.argv[2:]))",
        tmp_path / "run", "ls", "inspect", "verify",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) > 10
    assert faults.files_in(tmp_path) == before


def test_exit_codes_and_one_line_for_what_is_wrong(tmp_path):
    train(tmp_path / "run", 10)
    (tmp_path / "run" / "10" / "_CHECKPOINT_METADATA").write_bytes(b"{")
    done = program("verify", tmp_path / "run")
    assert (done.returncode, done.stderr) == (1, "")
    assert "_CHECKPOINT_METADATA was changed" in done.stdout
    done = program("inspect", tmp_path / "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"flax-rpsave: error: {tmp_path}/none does not exist\n"


def test_a_reader_that_has_enough_ends_the_program_quietly(tmp_path):
    train(tmp_path / "run", 10)
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m flax_rpsave.cli ls {tmp_path}/run | true"],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["ls"], ["ls", "a", "b"], ["verify", "--step"]])
def test_wrong_usage_is_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]


def test_help_names_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "0 all is well, 1 something is damaged, 2 wrong usage or nothing there, 3 the storage cannot be read" in said


# What is not there or cannot be read


@pytest.mark.parametrize("name", ["ls", "inspect", "verify"])
def test_nothing_there_is_code_2(command, tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "logs").mkdir(parents=True)
    (tmp_path / "file").write_text("a file")
    for path in ("none", "empty", "other", "file"):
        code, out, err = command(name, tmp_path / path)
        assert (code, out, len(err)) == (2, [], 1)
        assert str(tmp_path / path) in err[0]


@pytest.mark.parametrize("name", ["inspect", "verify"])
def test_an_item_that_is_not_there_is_code_2(command, run, name):
    code, _, (err,) = command(name, "hdfs://host/run")
    assert (code, "s3://" in err) == (2, True)
    code, _, (err,) = command(name, run, "--item", "params")
    assert code == 2
    assert "has no item 'params'; it has ['default']" in err


@pytest.mark.parametrize("name", ["inspect", "verify"])
def test_what_may_not_be_read_is_code_3_and_not_damage(command, finished_run, name):
    with faults.without_rights() as folder:
        shutil.copytree(finished_run, folder / "run")
        for path in (folder / "run" / "20").rglob("_METADATA"):
            path.chmod(0)
        os.seteuid(65534)
        code, _, (err,) = command(name, folder / "run")
    assert code == 3
    assert "_METADATA" in err
    assert "ermission" in err


# ls


def test_ls_tells_committed_incomplete_and_moved_aside_steps_apart(command, as_json, run):
    with rps.CheckpointCallback(config(run), data=Data()) as checkpoint:
        checkpoint.resume(state_at(0), step=10, rewind=True)
    (run / "30.orbax-checkpoint-tmp-0123abcd").mkdir()
    (run / "5.orbax-checkpoint-tmp-deleted-0123abcd").mkdir()
    (run / "notes").mkdir()
    code, listed = as_json("ls", run)
    assert code == 0
    assert listed["directory"] == str(run)
    assert [(row["step"], row["state"]) for row in listed["steps"]] == [
        (5, "deleting"),
        (10, "committed"),
        (20, "abandoned"),
        (30, "incomplete"),
    ]
    step = listed["steps"][1]
    assert set(step) == {"step", "name", "state", "committed_ns", "nbytes", "metrics", "ours"}
    assert step["nbytes"] == sum(path.stat().st_size for path in (run / "10").rglob("*") if path.is_file())
    assert step["metrics"] == {"loss": 0.1, "bad": None}
    assert (
        step["committed_ns"] == json.loads((run / "10" / "_CHECKPOINT_METADATA").read_text())["commit_timestamp_nsecs"]
    )
    code, out, _ = command("ls", run)
    assert code == 0
    assert [line.split()[:2] for line in out[1:]] == [
        ["5", "deleting"], ["10", "committed"], ["20", "abandoned"], ["30", "incomplete"],
    ]  # fmt: skip
    assert "loss=0.1, bad=nan" in out[2]


def test_what_has_a_steps_name_and_is_no_directory_is_listed_as_such_and_never_opened(command, as_json, run):
    """A pipe that is opened would hang until somebody writes to it."""
    os.mkfifo(run / "30")
    (run / "0020").write_text("not step 20")
    (run / "40").symlink_to(run / "nothing")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(run / "50"))  # the whole path may be too long for a socket
        listed = as_json("ls", run)[1]["steps"]
        assert [(row["step"], row["name"], row["state"]) for row in listed] == [
            (10, "10", "committed"),
            (20, "20", "committed"),
            (20, "0020", "file"),
            (30, "30", "file"),
            (40, "40", "file"),
            (50, "50", "file"),
        ]
        code, out, _ = command("ls", run)
        assert (code, out[4].split()[:2]) == (0, ["30", "file"])
        code, report = as_json("verify", run)
        assert (code, [found["step"] for found in report["checkpoints"]]) == (0, [10, 20])
        for name in ("30", "0020", "40", "50"):
            for action in ("ls", "inspect", "verify"):
                code, out, err = command(action, run / name)
                assert (code, out) == (2, [])
                assert str(run / name) in err[0]


# inspect


def test_inspect_lists_every_leaf_as_it_is_stored(as_json, command, finished_run):
    code, found = as_json("inspect", finished_run)
    assert code == 0
    assert (found["step"], found["digests"], found["own"]["processes"]) == (20, True, 1)
    assert found["format"] == ("zarr3 in OCDBT" if "ocdbt" in str(finished_run) else "zarr3 as files")
    assert found["own"]["versions"]["jax"] == jax.__version__
    assert found["own"]["versions"]["flax_rpsave"] == rps.__version__
    rows = {row.pop("path"): row for row in found["leaves"]}
    assert rows["params/w"] == {
        "kind": "jax.Array", "dtype": "int32", "key_impl": None, "shape": [300], "chunk_shape": [100],
        "sharding": "P() on (data=8)", "nbytes": 1200, "chunks": 3, "writers": [0], "codecs": ["bytes"],
    }  # fmt: skip
    assert rows["key"]["key_impl"] == "threefry2x32"
    assert (rows["note"]["kind"], rows["empty"]["kind"], rows["count"]["kind"]) == ("string", "Dict", "scalar")
    code, out, _ = command("inspect", finished_run / "10")
    assert code == 0
    assert out[0] == f"{finished_run}/10/default"
    (line,) = [line for line in out if line.startswith("params/w")]
    assert line.split() == [
        "params/w",
        "int32",
        "[300]",
        "[100]",
        "1.2",
        "kB",
        "3",
        "0",
        "bytes",
        "P()",
        "on",
        "(data=8)",
    ]


def test_inspect_takes_a_checkpoint_without_a_run(as_json, tmp_path):
    rps.save(tmp_path / "c", {"x": np.ones(3)})
    code, found = as_json("inspect", tmp_path / "c")
    assert (code, found["step"], [row["path"] for row in found["leaves"]]) == (0, None, ["x"])


# verify


def test_verify_finds_a_sound_run_sound(as_json, command, finished_run):
    code, found = as_json("verify", finished_run)
    assert (code, found["damaged"]) == (0, 0)
    for step in found["checkpoints"]:
        assert (step["state"], step["faults"], step["unverified"]) == ("sound", [], 0)
        assert (step["checked"]["leaves"], step["checked"]["chunks"]) == (5, 5)  # chunks: 3 + 1 + 1
        assert step["checked"]["bytes"] == 1200 + 8 + 8
        assert step["checked"]["documents"] == 7
        assert (step["checked"]["nodes"] > 0) == ("ocdbt" in str(finished_run))
    code, out, _ = command("verify", finished_run / "10")
    assert (code, len(out)) == (0, 1)
    assert out[0].startswith("step 10: sound")


def test_verify_names_file_leaf_and_step_of_every_fault(as_json, run):
    """A chunk, a document and, where it is a file of its own, a data-iterator state."""
    step = run / "20" / "default"
    if (step / "manifest.ocdbt").exists():
        values = np.arange(120, 220, dtype=np.int32).tobytes()
        (file,) = [path for path in step.rglob("d/*") if values in path.read_bytes()]
        flip(file, file.read_bytes().index(values) + 17)
        damaged = {"params/w": str(file.relative_to(run / "20"))}
    else:
        damaged = {"params/w": "default/params.w/c/1", None: "default/.rpsave/process_0/data"}
        for file in damaged.values():
            flip(run / "20" / file, 3)
    flip(step / "_sharding", 20)
    code, found = as_json("verify", run)
    assert (code, found["damaged"]) == (1, 1)
    assert [c["state"] for c in found["checkpoints"]] == ["sound", "damaged"]
    told = {(fault["file"], fault["leaf"]) for fault in found["checkpoints"][1]["faults"]}
    assert told == {("default/_sharding", None), *((file, leaf) for leaf, file in damaged.items())}
    assert found["checkpoints"][1]["checked"]["chunks"] == 4  # the rest was looked at, too


def test_verify_says_which_step_is_the_newest_that_verifies(command, run):
    flip(run / "20" / "default" / "_METADATA", 30)
    code, out, _ = command("verify", run)
    assert code == 1
    assert [line for line in out if line.startswith("step ")][1].startswith("step 20: damaged")
    assert any(line.strip().startswith("default/_METADATA: ") for line in out)
    assert out[-1] == "1 of 2 steps are damaged; the newest that verifies is 10"


@pytest.mark.parametrize("how", ["changed", "cut off", "deleted"])
def test_verify_finds_whatever_a_restore_would_and_names_the_file(run, as_json, how):
    """At offsets spread over every file of a step. Bytes that nobody reads may be passed over, by both."""
    step = run / "20"
    found = 0
    for path in [path for path in sorted(step.rglob("*")) if path.is_file()]:
        data = path.read_bytes()
        n = len(data)
        for at in sorted({0, n // 3, 2 * n // 3, n - 1}) if how != "deleted" else [0]:
            if how == "changed":
                flip(path, at, at % 8)
            elif how == "cut off":
                path.write_bytes(data[:at])
            else:
                path.unlink()
            try:
                rps.load(run, step=20)
                refused = False
            except rps.CorruptCheckpointError:
                refused = True
            code, report = as_json("verify", step)
            path.write_bytes(data)
            if refused:
                found += 1
                assert code == 1, (path, at)
                files = [fault["file"] for fault in report["checkpoints"][0]["faults"]]
                name = str(path.relative_to(step))
                assert name in files or (how == "deleted" and files), (path, at, files)
    assert found > 5
    assert as_json("verify", step)[0] == 0


def test_a_checkpoint_without_its_documents_is_damaged_and_not_nothing(tmp_path, as_json):
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "both"):
        rps.save(tmp_path / name, {"x": np.ones(3)})
        for document in ("_METADATA", "_CHECKPOINT_METADATA") if name == "both" else (name,):
            (tmp_path / name / document).unlink()
        code, found = as_json("verify", tmp_path / name)
        assert (code, found["checkpoints"][0]["state"]) == (1, "damaged")


def test_verify_passes_over_a_step_that_is_deleted_meanwhile(command, run, monkeypatch):
    read_documents = cli.audit.__globals__["read_documents"]

    def deleting(directory, item):
        if directory.name == "10":
            shutil.rmtree(run / "10")
        return read_documents(directory, item)

    monkeypatch.setitem(cli.audit.__globals__, "read_documents", deleting)
    code, out, _ = command("verify", run)
    assert code == 0
    assert not any("step 10" in line for line in out)


def test_verify_says_what_has_no_digest(as_json, command, tmp_path):
    train(tmp_path / "run", 10, checksum=False)
    code, found = as_json("verify", tmp_path / "run")
    assert code == 0
    (step,) = found["checkpoints"]
    assert (step["state"], step["unverified"], step["checked"]["chunks"]) == ("not verifiable", 5, 0)
    assert step["checked"]["documents"] == 7
    _, out, _ = command("verify", tmp_path / "run")
    assert "5 chunks have no digest" in out[1]


# Checkpoints of stock Orbax


@pytest.fixture(scope="module", params=["ocdbt", "zarr2 files", "zarr3 files"])
def stock_run(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("stock") / "run"
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=request.param == "ocdbt", use_zarr3=request.param == "zarr3 files")
    with ocp.CheckpointManager(root, options=options, item_handlers=handler) as manager:
        state = state_at(10)
        manager.save(10, args=ocp.args.PyTreeSave({"params": state["params"], "count": 10}), metrics={"loss": 0.5})
    return root


def test_stock_checkpoints_are_listed_inspected_and_read(stock_run, as_json, command):
    before = faults.files_in(stock_run)
    code, listed = as_json("ls", stock_run)
    assert (code, [(row["step"], row["ours"]) for row in listed["steps"]]) == (0, [(10, False)])
    code, found = as_json("inspect", stock_run)
    assert (code, found["digests"], found["own"]) == (0, False, {})
    rows = {row["path"]: row for row in found["leaves"]}
    assert (rows["params/w"]["shape"], rows["params/w"]["dtype"], rows["params/w"]["writers"]) == ([300], "int32", [])
    assert rows["params/w"]["sharding"] == "P() on (data=8)"
    code, out, _ = command("verify", stock_run)
    assert code == 0
    assert "not verifiable" in out[0]
    assert "have no digest (stock Orbax and `checksum: false` store none)" in out[1]
    assert faults.files_in(stock_run) == before


def test_a_stock_checkpoint_with_a_file_missing_is_damaged(stock_run, tmp_path, as_json):
    shutil.copytree(stock_run, tmp_path / "run")
    for path in (tmp_path / "run" / "10").rglob("*"):
        if path.is_file() and path.stat().st_size > 300 and not path.name.startswith("_"):
            path.unlink()
    code, found = as_json("verify", tmp_path / "run")
    assert (code, found["checkpoints"][0]["state"]) == (1, "damaged")


# Object stores


@pytest.fixture
def bucket(monkeypatch):
    """The URL of an S3 bucket, of a server in a process of its own."""
    port = free_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT"))
                break
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield "s3://bucket"
    finally:
        server.kill()
        server.wait()


def test_runs_in_object_stores_are_listed_inspected_and_verified(bucket, as_json, command):
    root = f"{bucket}/run"
    train(root, 10, 20, 30)
    code, listed = as_json("ls", root)
    assert (code, listed["directory"]) == (0, root)
    assert [(row["step"], row["state"], row["nbytes"]) for row in listed["steps"]] == [
        (10, "committed", None), (20, "committed", None), (30, "committed", None),
    ]  # fmt: skip
    code, found = as_json("inspect", f"{root}/10")
    assert (code, found["item"], len(found["leaves"])) == (0, f"{root}/10/default", 5)
    code, report = as_json("verify", root)
    assert (code, [step["state"] for step in report["checkpoints"]]) == (0, ["sound"] * 3)

    directory = open_directory(root, new_context())
    directory.write("20/default/_METADATA", b"{}")
    directory.remove("30/commit_success.txt")
    assert [row["state"] for row in as_json("ls", root)[1]["steps"]] == ["committed", "committed", "incomplete"]
    code, report = as_json("verify", root)
    assert (code, [step["state"] for step in report["checkpoints"]]) == (1, ["sound", "damaged"])
    assert [fault["file"] for fault in report["checkpoints"][1]["faults"]] == ["default/_METADATA"]
    code, _, (err,) = command("verify", f"{root}/30")
    assert (code, "is not committed" in err) == (2, True)
    assert command("verify", f"{bucket}/none")[0] == 2
    assert command("ls", "s3://no-such-bucket/run")[0] == 3
