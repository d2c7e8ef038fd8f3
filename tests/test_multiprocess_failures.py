"""What one process does wrong, all hear of, in time; a step is complete or invisible."""

import os
import random
import signal
import textwrap
import time

import numpy as np
import pytest

import flax_rpsave as rps
from tests.processes import ended, run, started

LOOP = """
values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
def make(step):
    return {"w": put(values + step), "b": put(values[0] * step)}
def directory():
    return sys.argv[1]
config = dict(directory=directory(), save_interval_steps=1, commit_timeout_secs=float(sys.argv[2]),
              replica_parallel={"min_slice_bytes": 1})
def end_after_failure(checkpoint, survivors):
    try:
        checkpoint.wait()
    except rps.SaveError as error:
        say("failed:", error)
    say(checkpoint.all_steps())
    open(f"{directory()}/told{process}", "w").close()
    while not all(os.path.exists(f"{directory()}/told{survivor}") for survivor in survivors):
        time.sleep(0.02)  # with process 0 the runtime of the others ends
    os._exit(3)  # the runtime cannot shut down in order any more
"""


def loop(script):
    """A script that begins with what the loops here share."""
    return LOOP + textwrap.dedent(script)


RESUME = loop("""
with rps.CheckpointCallback(config) as checkpoint:
    state, step = checkpoint.resume(make(0))
    if step:
        assert (np.asarray(state["w"].addressable_data(0)) == values + step).all()
    say(step)
""")


def resumed_step(directory):
    """The step that a new run resumes, its values checked."""
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    with rps.CheckpointCallback({"directory": str(directory), "save_interval_steps": 1}) as checkpoint:
        state, step = checkpoint.resume({"w": values * 0, "b": values[0] * 0})
    assert step
    assert (state["w"] == values + step).all()
    assert (state["b"] == values[0] * step).all()
    return step


@pytest.mark.usefixtures("each_engine")
def test_a_write_that_fails_in_one_process_is_raised_in_all_and_the_next_save_works(tmp_path):
    script = loop("""
    from tests import faults
    class Failing:
        writes = 0
        def write(self, pieces):
            Failing.writes += 1
            if process == 1 and Failing.writes == 2:
                raise OSError(28, "No space left on device", "/ckpt/data")
            super().write(pieces)
    fault = faults.engine(Failing)
    fault.__enter__()
    with rps.CheckpointCallback(config) as checkpoint:
        checkpoint(1, make(1))
        checkpoint(2, make(2))
        try:
            checkpoint.wait()
        except rps.SaveError as error:
            say("failed:", error)
        say(checkpoint.all_steps())
        checkpoint(3, make(3))
        checkpoint.wait()
        say(checkpoint.all_steps())
    """)
    results = run(script, 3, args=[str(tmp_path / "run"), "20"])
    for number, result in enumerate(results):
        assert result.said[0].startswith("failed:")
        assert "No space left on device" in result.said[0]
        assert number == 1 or "process 1" in result.said[0]
        assert result.said[1:] == ["[1]", "[1, 3]"]
    assert resumed_step(tmp_path / "run") == 3


def test_a_process_that_is_late_is_named_and_the_next_save_works(tmp_path):
    script = loop("""
    from tests import faults
    class Late:
        writes = 0
        def write(self, pieces):
            Late.writes += 1
            if process == 1 and Late.writes == 2:
                while not os.path.exists(directory() + "/go"):
                    time.sleep(0.05)
            super().write(pieces)
    fault = faults.engine(Late)
    fault.__enter__()
    with rps.CheckpointCallback(config) as checkpoint:
        checkpoint(1, make(1))
        checkpoint(2, make(2))
        if process == 0:
            try:
                checkpoint.wait()
            except rps.CommitTimeoutError as error:
                say("failed:", error)
            open(directory() + "/go", "w").close()
        else:
            try:
                checkpoint.wait()
            except rps.SaveError as error:
                say("failed:", error)
        checkpoint(3, make(3))
        checkpoint.wait()
        say(checkpoint.all_steps())
    """)
    results = run(script, 2, args=[str(tmp_path / "run"), "3"])
    assert "process 1 did not report within 3 s" in results[0].said[0]
    assert results[1].said[0].startswith("failed:")
    assert [result.said[-1] for result in results] == ["[1, 3]"] * 2
    assert resumed_step(tmp_path / "run") == 3


def test_a_process_that_is_late_but_in_time_holds_up_the_commit_and_nothing_else(tmp_path):
    script = loop("""
    os.environ["RPSAVE_ENGINE"] = "tensorstore"
    from flax_rpsave.agreement import Channel
    from flax_rpsave.engine import TensorStoreEngine
    def announce(method, where):
        real = getattr(Channel, method)
        def announced(self, *args, **kwargs):
            if self._what == where:
                open(f"{directory()}/waiting{process}", "w").close()
            return real(self, *args, **kwargs)
        setattr(Channel, method, announced)
    announce("collect", "step 2")  # process 0 has written step 2, and waits for the others
    announce("hear", "step 3")  # the others have written step 3, and wait for process 0
    write = TensorStoreEngine.write
    def late(self, pieces):
        for step, who, others in (("2", 1, [0]), ("3", 0, [1, 2])):
            if process == who and f"{step}.orbax" in str(self._database):
                while not all(os.path.exists(f"{directory()}/waiting{other}") for other in others):
                    time.sleep(0.02)
        write(self, pieces)
    TensorStoreEngine.write = late
    with rps.CheckpointCallback(config) as checkpoint:
        for step in (1, 2, 3):
            checkpoint(step, make(step))
    say(checkpoint.all_steps())
    """)
    assert [r.said for r in run(script, 3, args=[str(tmp_path / "run"), "60"])] == [["[1, 2, 3]"]] * 3
    assert resumed_step(tmp_path / "run") == 3


@pytest.mark.parametrize("phase", ["snapshot", "write", "agreement"])
def test_survivors_of_a_killed_worker_are_told_and_nothing_incomplete_is_visible(tmp_path, phase):
    script = loop("""
    from flax_rpsave.agreement import Channel
    from flax_rpsave.snapshot import Snapshot, Snapshotter
    owner, name = {"snapshot": (Snapshotter, "take"), "write": (Snapshot, "pieces"),
                   "agreement": (Channel, "report")}[sys.argv[3]]
    real, calls = getattr(owner, name), []
    def dying(*args, **kwargs):
        calls.append(1)
        if process == 1 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(owner, name, dying)
    checkpoint = rps.CheckpointCallback(config)
    checkpoint(1, make(1))
    checkpoint.wait()
    checkpoint(2, make(2))
    end_after_failure(checkpoint, survivors=[0, 2])
    """)
    with started(script, 3, args=[str(tmp_path / "run"), "4", phase]) as running:
        results = ended(running)
    assert [result.code for result in results] == [3, -signal.SIGKILL, 3]
    for survivor in (results[0], results[2]):
        assert "process 1 did not report within 4 s" in survivor.said[0]
        assert survivor.said[1] == "[1]"
    assert resumed_step(tmp_path / "run") == 1


def test_a_worker_that_dies_once_it_has_reported_does_not_keep_the_step_from_being_committed(tmp_path):
    script = loop("""
    from flax_rpsave.agreement import Channel
    report = Channel.report
    def dying(self, *args, **kwargs):
        report(self, *args, **kwargs)
        if process == 1 and self._what == "step 2":
            os.kill(os.getpid(), signal.SIGKILL)
    Channel.report = dying
    checkpoint = rps.CheckpointCallback(config)
    for step in (1, 2):
        checkpoint(step, make(step))
        checkpoint.wait()
    say(checkpoint.all_steps())
    checkpoint(3, make(3))
    end_after_failure(checkpoint, survivors=[0, 2])
    """)
    with started(script, 3, args=[str(tmp_path / "run"), "4"]) as running:
        results = ended(running)
    assert [result.code for result in results] == [3, -signal.SIGKILL, 3]
    for survivor in (results[0], results[2]):
        assert survivor.said[0] == survivor.said[2] == "[1, 2]"
        assert "process 1 did not report within 4 s" in survivor.said[1]
    assert resumed_step(tmp_path / "run") == 2


# `watch(at)` has process 0 call `at(n, name)` before the n-th thing that it does in the commit of step 2, whatever
# changes the directory or tells the others; and once more when it has told them.
WATCH_COMMIT = """
import itertools
from flax_rpsave import commit
from flax_rpsave.agreement import Channel
from flax_rpsave.directory import FileDirectory
def watch(at):
    numbers, committing = itertools.count(), []
    def watched(owner, name):
        real = getattr(owner, name)
        def announced(*args, **kwargs):
            if process == 0 and committing:
                at(next(numbers), name)
            return real(*args, **kwargs)
        setattr(owner, name, announced)
    for name in ("merge", "check"):
        watched(commit, name)
    for name in ("write", "sync", "move_to"):
        watched(FileDirectory, name)
    watched(Channel, "decide")
    collect, decide = Channel.collect, Channel.decide
    def collected(self, *args):
        reports = collect(self, *args)
        committing.extend(["step 2"] * (self._what == "step 2"))
        return reports
    def decided(self, *args, **kwargs):
        decide(self, *args, **kwargs)
        if committing:
            at(next(numbers), "told")
            committing.clear()
    Channel.collect, Channel.decide = collected, decided
"""


def test_whatever_the_commit_has_done_when_process_0_dies_the_step_is_complete_or_invisible(tmp_path):
    script = loop(WATCH_COMMIT) + textwrap.dedent("""
    import shutil
    # What a kill at this moment would leave: the others have written all, and do nothing but wait.
    watch(lambda n, name: (say(name), shutil.copytree(directory(), f"{directory()}-{n}")))
    with rps.CheckpointCallback(config) as checkpoint:
        for step in (1, 2):
            checkpoint(step, make(step))
    """)
    moments = run(script, 2, args=[str(tmp_path / "run"), "20"])[0].said
    assert moments[:2] == ["merge", "check"]
    assert moments.count("write") >= 6  # the documents and the markers
    assert moments[-4:] == ["move_to", "sync", "decide", "told"]
    for n, name in enumerate(moments):
        left = tmp_path / f"run-{n}"
        committed = [1, 2] if n > moments.index("move_to") else [1]
        assert resumed_step(left) == committed[-1], name
        with rps.CheckpointCallback({"directory": str(left), "save_interval_steps": 1}) as checkpoint:
            assert checkpoint.all_steps() == committed, name
            checkpoint(3, {"w": np.zeros(3)})
        assert sorted(path.name for path in left.iterdir()) == [str(step) for step in (*committed, 3)], name


@pytest.mark.parametrize("moment", ["check", "move_to", "decide"])
def test_process_0_killed_in_its_commit_ends_the_others_and_the_next_run_resumes(tmp_path, moment):
    script = loop(WATCH_COMMIT) + textwrap.dedent("""
    watch(lambda n, name: os.kill(os.getpid(), signal.SIGKILL) if name == sys.argv[3] else None)
    with rps.CheckpointCallback(config) as checkpoint:
        for step in (1, 2):
            checkpoint(step, make(step))
            checkpoint.wait()
    """)
    with started(script, 2, args=[str(tmp_path / "run"), "20", moment]) as running:
        results = ended(running)
    assert results[0].code == -signal.SIGKILL
    assert results[1].code != 0
    assert resumed_step(tmp_path / "run") == (2 if moment == "decide" else 1)


def test_the_run_after_the_death_of_process_0_resumes(tmp_path):
    script = loop("""
    with rps.CheckpointCallback(config) as checkpoint:
        step = 0
        while True:
            step += 1
            checkpoint(step, make(step))
            if step == 3:
                checkpoint.wait()
                say("three")
    """)
    with started(script, 2, args=[str(tmp_path / "run"), "10"]) as running:
        for line in running[0].stdout:
            if "three" in line:
                break
        running[0].send_signal(signal.SIGKILL)
        results = ended(running)
    assert results[1].code != 0
    assert resumed_step(tmp_path / "run") >= 3


def test_a_directory_that_is_not_shared_is_named_as_the_reason(tmp_path):
    script = loop("""
    with rps.CheckpointCallback({**config, "directory": f"{directory()}{process}"}) as checkpoint:
        checkpoint(1, make(1))
        try:
            checkpoint.wait()
        except rps.SaveError as error:
            say(error)
    """)
    for result in run(script, 2, args=[str(tmp_path / "run"), "20"]):
        assert "process 1" in result.said[0]
        assert "shared by all processes" in result.said[0]
    assert rps.CheckpointCallback({"directory": str(tmp_path / "run0")}).all_steps() == []


def test_what_differs_between_processes_or_fails_in_the_call_of_one_is_named_in_all(tmp_path):
    script = loop("""
    def told(checkpoint, step, state, **keys):
        try:
            checkpoint(step, state, **keys)
            checkpoint.wait()
            say("saved", step)
        except (rps.RPSaveError, TypeError) as error:
            say(" ".join(str(error).split()))

    with rps.CheckpointCallback(config) as checkpoint:
        told(checkpoint, 1, {**make(1), f"only{process}": np.ones(3)})
        told(checkpoint, 2, make(2), extra={} if process else {"set": {1}})
        told(checkpoint, 3, make(3), extra={"set": {1}} if process else {})
        gone = make(4)
        if process:
            gone["w"].delete()
        told(checkpoint, 4, gone)
        told(checkpoint, 5, make(5))
    storage = {"compression": "zstd" if process else None}
    with rps.CheckpointCallback({**config, "storage": storage}) as checkpoint:
        checkpoint.resume(make(0))
        told(checkpoint, 6, make(6))
        say(checkpoint.all_steps())
    # Another name of the same directory, in one of them.
    if process:
        os.symlink(directory(), directory() + "-link")
    with rps.CheckpointCallback({**config, "directory": directory() + "-link" * process}) as checkpoint:
        say(checkpoint.resume(make(0))[1])
        try:
            checkpoint.resume(make(0), skip=["w"] if process else [])
        except rps.TreeMismatchError as error:
            say(error)
        say(checkpoint.resume(make(0))[1])
    """)
    results = run(script, 2, args=[str(tmp_path / "run"), "20"])
    expected = [
        "has another state than process 0 (3 and 3 arrays)",
        "JSON can hold",
        "JSON can hold",
        "deleted",
        "saved 5",
        "checkpoint.storage.compression is 'zstd', in process 0 None",
        "[5]",
        "5",
        "processes [1] ask for other leaves",
        "5",
    ]
    for result in results:
        assert len(result.said) == len(expected)
        for said, part in zip(result.said, expected, strict=True):
            assert part in said
        assert "could not be told" not in result.output
    assert "only1: float64[3], on no mesh" in results[0].said[0]


@pytest.mark.usefixtures("each_engine")
def test_one_damaged_chunk_makes_all_processes_fall_back_to_the_step_before(tmp_path):
    args = [str(tmp_path / "run"), "20"]
    script = loop("""
    with rps.CheckpointCallback(config) as checkpoint:
        for step in (1, 2):
            checkpoint(step, make(step))
    """)
    run(script, 2, args=args)
    data = max((tmp_path / "run" / "2").glob("default/ocdbt.process_*/d/*"), key=lambda path: path.stat().st_size)
    damaged = bytearray(data.read_bytes())
    damaged[10] ^= 1
    data.write_bytes(damaged)
    assert [result.said for result in run(RESUME, 2, args=args)] == [["1"], ["1"]]


def test_sigterm_in_any_process_saves_the_same_step_in_all_and_sets_should_stop(tmp_path):  # report 43
    script = loop("""
    config = {**config, "save_interval_steps": 1000000, "preemption_signals": ["SIGTERM", "SIGUSR2"]}
    other = rps.CheckpointCallback({**config, "directory": directory() + "-other"})  # called less often
    with rps.CheckpointCallback(config) as checkpoint:
        step = 0
        while not checkpoint.should_stop:
            step += 3
            checkpoint(step, make(step))
            if step % 5 == 0:
                other(step, make(step))
            time.sleep(0.01)
            if step == 30:
                say("running")
        stopped_at = step
        other(step + 1, make(step))
        say(other.should_stop)
        other.close()
        while step < stopped_at + 30:  # what `should_stop` says is the loop's to heed: nothing exits by itself
            step += 3
            checkpoint(step, make(step))
    say(stopped_at, checkpoint.should_stop, checkpoint.all_steps())
    """)
    victim = random.randrange(4)
    print(f"SIGTERM goes to process {victim}")
    with started(script, 4, args=[str(tmp_path / "run"), "20"]) as running:
        for line in running[victim].stdout:
            if "running" in line:
                break
        os.kill(running[victim].pid, random.choice([signal.SIGTERM, signal.SIGUSR2]))
        results = ended(running)
    assert [result.code for result in results] == [0, 0, 0, 0]
    assert {result.said[-2] for result in results} == {"True"}
    (last,) = {result.said[-1] for result in results}
    step = int(last.split()[0])
    assert step >= 30
    assert last == f"{step} True [{step}]"


def test_random_kills_of_a_two_process_loop_leave_only_complete_steps(tmp_path):
    script = loop("""
    with rps.CheckpointCallback({**config, "max_to_keep": 3}) as checkpoint:
        state, step = checkpoint.resume(make(0))
        assert step == 0 or (np.asarray(state["w"].addressable_data(0)) == values + step).all()
        say("resumed", step)
        while True:
            step += 1
            checkpoint(step, make(step))
            checkpoint.wait()
            say("committed", step)
    """)
    seed = int(os.environ.get("RPSAVE_SEED", random.randrange(2**32)))
    print(f"RPSAVE_SEED={seed}")
    rng = random.Random(seed)
    newest = 0
    for _ in range(int(os.environ.get("RPSAVE_KILLS", "3"))):
        with started(script, 2, args=[str(tmp_path / "run"), "10"]) as running:
            for line in running[0].stdout:
                if line.startswith("SAY resumed"):
                    assert int(line.split()[2]) >= newest
                if line.startswith("SAY committed"):
                    newest = int(line.split()[2])
                    break
            time.sleep(rng.uniform(0, 0.25))
            victim = rng.randrange(2)
            running[victim].send_signal(signal.SIGKILL)
            time.sleep(rng.choice([0, 0.05]))  # the survivor may go on for a while
            running[1 - victim].kill()
            for popen in running:
                popen.wait()
            for line in running[0].stdout:
                if line.startswith("SAY committed"):
                    newest = int(line.split()[2])
    assert resumed_step(tmp_path / "run") >= newest
