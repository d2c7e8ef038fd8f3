"""Programs that fork while a callback lives: the child neither hangs nor touches what the parent saves."""

import pathlib
import re

import pytest

import flax_rpsave as rps
from tests import faults
from tests.faults.runs import assert_is_of, state_at

PRELUDE = """
import multiprocessing, os, pathlib, sys, time, warnings
warnings.simplefilter("ignore", RuntimeWarning)  # JAX's, of the fork that this program asks for
warnings.simplefilter("ignore", DeprecationWarning)  # Python's
from tests import faults
import flax_rpsave as rps
from tests.faults.runs import config, state_at
root = pathlib.Path(sys.argv[1])
"""
PACKAGE = pathlib.Path(rps.__file__).parent


@pytest.mark.parametrize(  # a child of JAX cannot end in another way
    ("engine", "way"), [("direct", "os._exit(7)"), ("tensorstore", "checkpoint.close(); os._exit(7)")]
)
def test_a_child_forked_during_a_save_leaves_it_alone(tmp_path, engine, way):  # field report 46
    done = faults.run_python(
        PRELUDE
        + f"""
with faults.gated_writer() as gate, rps.CheckpointCallback(config(root)) as checkpoint:
    checkpoint(1, state_at(1))
    gate.wait_reached()
    if (child := os.fork()) == 0:
        {way}
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    gate.open()
    checkpoint.wait()
    checkpoint(2, state_at(2))
print(code, checkpoint.all_steps())
""",
        tmp_path / "run",
        RPSAVE_ENGINE=engine,
    )
    assert (done.returncode, done.stdout) == (0, "7 [1, 2]\n"), done.stderr
    for step in (1, 2):
        assert_is_of(rps.load(tmp_path / "run", state_at(0), step=step), step)
    sources = "".join(path.read_text() for path in PACKAGE.glob("*.py"))
    assert not re.search(r"os\.fork|multiprocessing|subprocess", sources)  # nor does it fork itself


def test_a_child_does_not_save_with_the_parents_callback(tmp_path):  # field report 46
    done = faults.run_python(
        PRELUDE
        + """
with rps.CheckpointCallback(config(root)) as checkpoint:
    checkpoint(1, state_at(1))
    checkpoint.wait()
    if (child := os.fork()) == 0:
        for use in (
            lambda: checkpoint(2, state_at(2)), checkpoint.wait, lambda: checkpoint.resume(state_at(0)),
            lambda: rps.CheckpointCallback(config(root)), lambda: rps.load(root), lambda: rps.save(root, {"x": 1.0}),
        ):
            try:
                use()
            except rps.RPSaveError as error:
                print(error, flush=True)
        checkpoint.close()
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), checkpoint.all_steps(), flush=True)
    checkpoint(2, state_at(2))
print(os.getpid(), checkpoint.all_steps())
""",
        tmp_path / "run",
    )
    *said, between, after = done.stdout.splitlines()
    assert (done.returncode, between) == (0, "7 [1]"), done.stderr
    parent = after.partition(" ")[0]
    instead = 'start processes by "spawn", not by "fork"'
    why = f"this callback was made by pid {parent}, of which this process is a fork: {instead}"
    tensorstore = f"this process is a fork of pid {parent}, which has used TensorStore: {instead}"
    assert said == [f"step 2: {why}", f"wait: {why}", f"resume: {why}", *[tensorstore] * 3]
    assert after == f"{parent} [1, 2]"
    assert_is_of(rps.load(tmp_path / "run", state_at(0)), 2)


def test_a_forked_worker_ends_when_it_is_told_to_and_the_parent_is_not_preempted_by_that(tmp_path):
    done = faults.run_python(
        PRELUDE
        + """
def work(begun):
    begun.set()
    time.sleep(600)

with rps.CheckpointCallback(config(root)) as checkpoint:
    context = multiprocessing.get_context("fork")
    for step in range(1, 4):
        checkpoint(step, state_at(step))
        begun = context.Event()
        worker = context.Process(target=work, args=(begun,))
        worker.start()
        begun.wait()  # Python forgets signals that come while it forks
        worker.terminate()  # by SIGTERM, which announces a preemption to the parent
        worker.join()
        print(worker.exitcode, checkpoint.should_stop)
print(checkpoint.all_steps())
""",
        tmp_path / "run",
    )
    assert (done.returncode, done.stdout) == (0, "-15 False\n" * 3 + "[1, 2, 3]\n"), done.stderr
    for step in (1, 2, 3):
        assert_is_of(rps.load(tmp_path / "run", state_at(0), step=step), step)
