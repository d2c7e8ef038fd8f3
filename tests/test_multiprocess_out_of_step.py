"""Processes that do not do the same, or not at the same time, or not in the same place: all are told what differs."""

import shutil
import textwrap

import numpy as np
import pytest

import flax_rpsave as rps
from tests.processes import run
from tests.test_multiprocess_failures import loop

MEETING = """
def meet(name):
    open(f"{directory()}/{name}{process}", "w").close()
    wait_for(name, range(processes))
def wait_for(name, others):
    while not all(os.path.exists(f"{directory()}/{name}{other}") for other in others):
        time.sleep(0.02)
def told(action, *args):
    try:
        say("done", action(*args))
    except rps.RPSaveError as error:
        say(f"{type(error).__name__}:", error)
os.makedirs(directory(), exist_ok=True)
"""


def script(text):
    return loop(MEETING) + textwrap.dedent(text)


def save_alone(directory, step):
    """A step of a state such as the loops have, saved by one process."""
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    with rps.CheckpointCallback({"directory": str(directory), "save_interval_steps": 1}) as checkpoint:
        checkpoint(step, {"w": values + step, "b": values[0] * step})


@pytest.mark.parametrize(("absent", "named"), [([0, 2], "processes 0, 2"), ([1], "process 1")], ids=str)
def test_who_is_away_while_the_others_resume_is_named_in_time_and_the_next_resume_works(tmp_path, absent, named):
    text = script("""
    absent = json.loads(sys.argv[3])
    with rps.CheckpointCallback(config) as checkpoint:
        if process in absent:
            wait_for("gone", {*range(processes)} - {*absent})
        told(lambda: checkpoint.resume(make(0))[1])
        meet("gone")
        told(lambda: checkpoint.resume(make(0))[1])
    """)
    results = run("import json\n" + text, 3, args=[str(tmp_path), "3", str(absent)])
    for process, result in enumerate(results):
        assert result.said[0].startswith(("CommitTimeoutError:", "SaveError:"))
        assert f"{named} did not report within 3 s (commit_timeout_secs)" in result.said[0], process
        assert result.said[1] == "done 0"


def test_a_directory_that_is_not_shared_is_found_by_resume_in_all_processes(tmp_path):
    for name, step in (("later1", 5), ("gone0", 5), ("other0", 5), ("other1", 5), ("copied0", 5)):
        save_alone(tmp_path / name, step)
    shutil.copytree(tmp_path / "copied0", tmp_path / "copied1")
    results = run(
        script("""
        for name in ("later", "gone", "other", "copied"):
            with rps.CheckpointCallback({**config, "directory": f"{directory()}/{name}{process}"}) as checkpoint:
                told(lambda: checkpoint.resume(make(0))[1])
        # Copies of one checkpoint may be read, but what each would save of the next step is not in one place.
        with rps.CheckpointCallback({**config, "directory": f"{directory()}/copied{process}"}) as checkpoint:
            checkpoint.resume(make(0))
            checkpoint(6, make(6))
            told(checkpoint.wait)
        """),
        2,
        args=[str(tmp_path), "20"],
    )
    views = [
        ("no steps in {}/later0, process 1 steps [5] in {}/later1", ""),
        ("steps [5] in {}/gone0, process 1 no steps in {}/gone1", ""),
        ("steps [5] in {}/other0, process 1 steps [5] in {}/other1", ", of which step 5 is another checkpoint"),
    ]
    for result in results:
        for said, (seen, though) in zip(result.said[:3], views, strict=True):
            seen = seen.replace("{}", str(tmp_path))
            assert said.startswith("ConfigError:")
            assert f"the processes see different checkpoints: process 0 {seen}{though}. " in said
            assert "must be shared by all processes" in said
        assert result.said[3] == "done 5"
        assert result.said[4].startswith("SaveError:")
        assert f"at {tmp_path}/copied1/6 what process 0 has prepared at {tmp_path}/copied0/6." in result.said[4]
        assert "must be shared by all processes" in result.said[4]
    assert not list(tmp_path.glob("*/6*"))


def test_a_process_that_comes_late_to_several_saves_is_in_time_for_the_next_one(tmp_path):
    results = run(
        script("""
        with rps.CheckpointCallback(config) as checkpoint:
            if process == 1:
                wait_for("given-up", [0])
            for step in (1, 2, 3):
                told(checkpoint, step, make(step))
                if process == 0:
                    checkpoint._saver.writer.wait()
            if process == 0:
                open(f"{directory()}/given-up0", "w").close()
            meet("late")
            for step in (4, 5):
                told(checkpoint, step, make(step))
            checkpoint.wait()
            meet("over")
            say(checkpoint.all_steps(), [name for name in sorted(os.listdir(directory())) if "tmp" in name])
        """),
        2,
        args=[str(tmp_path), "3"],
    )
    for result in results:
        assert result.said[0] == "done True"
        for step, said in enumerate(result.said[1:4], start=1):
            assert said.startswith(f"CommitTimeoutError: step {step}: process 1 did not report within 3 s")
        assert result.said[4:] == ["done True", "[4, 5] []"]


def test_process_0_that_comes_late_to_a_save_hears_why_it_is_over_and_the_next_save_works(tmp_path):
    results = run(
        script("""
        with rps.CheckpointCallback(config) as checkpoint:
            if process == 0:
                wait_for("given-up", [1, 2])
            checkpoint(1, make(1))
            told(checkpoint.wait)
            open(f"{directory()}/given-up{process}", "w").close()
            meet("late")
            told(checkpoint, 2, make(2))
        say(checkpoint.all_steps())
        """),
        3,
        args=[str(tmp_path), "2"],
    )
    for result in results:
        assert result.said[0].startswith("CommitTimeoutError: step 1: ")
        assert "step 1: process 0 did not begin within 4 s" in result.said[0]
        assert result.said[1:] == ["done True", "[2]"]


def test_a_late_process_and_one_that_knows_already_both_save_the_last_step_again(tmp_path):
    """What one has heard of in the call, and another has not yet, makes no difference to what they save."""
    results = run(
        script("""
        with rps.CheckpointCallback({**config, "on_error": "log"}) as checkpoint:
            if process == 1:
                wait_for("given-up", [0])
            told(checkpoint, 1, make(1))
            if process == 0:
                checkpoint._saver.writer.wait()
                open(f"{directory()}/given-up0", "w").close()
            checkpoint(1, make(1), force=True)
        say(checkpoint.all_steps())
        """),
        2,
        args=[str(tmp_path), "4"],
    )
    assert [result.said for result in results] == [["done True", "[1]"]] * 2


def test_a_callback_that_is_not_enabled_in_one_process_is_named_and_the_others_of_its_run_work(tmp_path):
    results = run(
        script("""
        def made(name, enabled=True):
            return rps.CheckpointCallback({**config, "directory": f"{directory()}/{name}", "enabled": enabled})
        only_0, only_1, both = made("only0", process == 0), made("only1", process == 1), made("both")
        for checkpoint in (only_0, only_1, both):
            told(lambda: checkpoint.resume(make(0))[1])
            told(checkpoint, 1, make(1))
            told(checkpoint.wait)
        """),
        2,
        args=[str(tmp_path), "60"],
    )
    enabled = ["done 0", "done True", "done None"]
    disabled = ["done 0", "done False", "done None"]
    for process, result in enumerate(results):
        resume, call, wait = result.said[process * 3 : process * 3 + 3]
        for said in (resume, wait):
            assert said.startswith("SaveError:")
            assert f"process {1 - process} will not take part: checkpoint.enabled is false there" in said
        assert call == "done True"
        assert result.said[(1 - process) * 3 : (1 - process) * 3 + 3] == disabled
        assert result.said[6:] == enabled
    assert not list(tmp_path.glob("only*/1"))


def test_callbacks_made_in_another_order_are_named_and_commit_nothing(tmp_path):
    results = run(
        script("""
        def made(name):
            return rps.CheckpointCallback({**config, "directory": f"{directory()}/{name}"})
        first, second = made(f"run{process}"), made(f"run{1 - process}")
        for checkpoint in (first, second):
            checkpoint(1, make(1))
        for checkpoint in (first, second):
            told(checkpoint.wait)
            say(checkpoint.all_steps())
        """),
        2,
        args=[str(tmp_path), "20"],
    )
    for result in results:
        assert result.said[1::2] == ["[]", "[]"]
        for said, process in zip(result.said[::2], (0, 1), strict=True):
            assert said.startswith("SaveError:")
            assert f"at {tmp_path}/run{1 - process}/1 what process 0 has prepared at {tmp_path}/run{process}/1." in said
            assert "must make the same callbacks in the same order" in said


def test_once_a_commit_is_known_no_process_sees_a_step_that_retention_does_not_keep(tmp_path):
    results = run(
        script("""
        from flax_rpsave.agreement import Channel
        decide = Channel.decide
        def deciding(self, *args, **kwargs):
            say(self._what, checkpoint.all_steps())
            decide(self, *args, **kwargs)
        Channel.decide = deciding
        with rps.CheckpointCallback({**config, "max_to_keep": 1}) as checkpoint:
            for step in (1, 2):
                checkpoint(step, make(step))
        say(checkpoint.all_steps())
        """),
        2,
        args=[str(tmp_path), "20"],
    )
    assert results[0].said == ["step 1 [1]", "step 2 [2]", "[2]"]
    assert results[1].said == ["[2]"]
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_after_a_call_that_failed_in_one_process_all_begin_the_same_saves(tmp_path):
    results = run(
        script("""
        with rps.CheckpointCallback({**config, "save_interval_steps": 10}) as checkpoint:
            for step in range(1, 24):
                state = make(step)
                if step == 10 and process:
                    state["w"].delete()
                try:
                    if checkpoint(step, state):
                        checkpoint.wait()
                        say("saved", step)
                except rps.SaveError as error:
                    say("failed at", step, error)
        """),
        2,
        args=[str(tmp_path), "20"],
    )
    for result in results:
        failed, saved = result.said
        assert failed.startswith("failed at 10 ")
        assert "deleted" in failed
        assert saved == "saved 20"


def test_what_resume_refuses_in_one_process_it_refuses_in_all_at_once(tmp_path):
    for step in (1, 2):
        save_alone(tmp_path / "run", step)
    results = run(
        script("""
        def asked(name, init=None, keys={}, **wanted):
            keys = {**config, "commit_timeout_secs": 60, "directory": f"{directory()}/{name}", **keys}
            with rps.CheckpointCallback(keys) as checkpoint:
                try:
                    say("done", checkpoint.resume(make(0), init=init, **wanted)[1])
                except (rps.RPSaveError, TypeError, OSError) as error:
                    say(error)

        def fail():
            raise OSError("no data here")

        asked("run", keys={"resume": "auto" if process else "never"})
        asked("run", step=1 if process else 9)
        asked("run", step=1, rewind=bool(process))
        asked("run", step=2 if process else "x")
        asked("run", step=2 if process else None)
        asked("empty", keys={"resume": "required" if process else "auto"})
        asked("empty", init=fail if process else (lambda: make(0)))
        asked("run")
        """),
        2,
        args=[str(tmp_path), "20"],
    )
    expected = [
        "checkpoint.resume is 'never'",
        "has no step 9",
        "step 1 is not the newest",
        "step must be an int, got str",
        "process 0 asks for step None with rewind=False, process 1 for step 2",
        "checkpoint.resume is 'required'",
        "no data here",
        "done 2",
    ]
    for result in results:
        for said, wanted in zip(result.said, expected, strict=True):
            assert wanted in said


def test_configurations_that_differ_are_refused_by_setting(tmp_path):
    differing = {
        "checkpoint.max_to_keep is 2, in process 0 None": {"max_to_keep": 2},
        "checkpoint.keep_best is {'metric': 'loss', ": {"keep_best": {"metric": "loss", "mode": "min"}},
        "checkpoint.save_on_preemption is False, in process 0 True": {"save_on_preemption": False},
        "whether there is a data iterator is True, in process 0 False": {"data": True},
    }
    results = run(
        script(f"""
        class Position:
            def get_state(self):
                return 1
            def set_state(self, state):
                pass
        for n, keys in enumerate({[*differing.values()]!r}):
            keys = keys if process else {{}}
            data = Position() if keys.pop("data", False) else None
            settings = {{**config, "directory": f"{{directory()}}/{{n}}", **keys}}
            with rps.CheckpointCallback(settings, data=data) as checkpoint:
                checkpoint(1, make(1))
                told(checkpoint.wait)
                say(checkpoint.all_steps())
        """),
        2,
        args=[str(tmp_path), "20"],
    )
    for result in results:
        assert len(result.said) == 2 * len(differing)
        for wanted, said, steps in zip(differing, result.said[::2], result.said[1::2], strict=True):
            assert wanted in said
            assert steps == "[]"


@pytest.mark.parametrize(("leaving", "how"), [(0, "an error"), (1, "close")])
def test_who_leaves_its_loop_is_not_waited_for(tmp_path, leaving, how):
    """Such as where the data of one process end before those of the others, or its train step raises."""
    text = script("""
    leaving, how = int(sys.argv[3]), sys.argv[4]
    def train():
        with rps.CheckpointCallback(config) as checkpoint:
            checkpoint(1, make(1))
            if process == leaving:
                if how == "close":
                    return
                raise ZeroDivisionError("a batch of nothing")
            checkpoint(2, make(2))
    try:
        told(train)
    except ZeroDivisionError as error:
        say("mine:", error)
    meet("ended")
    """)
    results = run(text, 2, args=[str(tmp_path), "6000", str(leaving), how])  # longer than the test may take
    why = "its callback was closed" if how == "close" else "its loop ended with ZeroDivisionError: a batch of nothing"
    said = results[1 - leaving].said
    assert said[0].startswith("SaveError: step 2")
    assert f"process {leaving} will not take part: {why}" in said[0]
    assert results[leaving].said[0] == ("done None" if how == "close" else "mine: a batch of nothing")
    assert set(rps.load(tmp_path, step=1)) == {"w", "b"}


def test_who_cannot_make_its_callback_is_not_waited_for(tmp_path):
    text = script("""
    if process == 1:
        config["directory"] = f"{directory()}/file"
        open(config["directory"], "w").close()
    try:
        checkpoint = rps.CheckpointCallback(config)
    except rps.ConfigError as error:
        say("mine:", error)
    else:
        told(lambda: checkpoint.resume(make(0)))
    meet("ended")
    """)
    results = run(text, 2, args=[str(tmp_path), "6000"])
    why = f"checkpoint.directory {tmp_path}/file cannot be written"
    assert results[1].said[0].startswith(f"mine: {why}")
    assert f"process 1 will not take part: its callback could not be made: {why}" in results[0].said[0]


@pytest.mark.parametrize("taken", [0, 1])
def test_who_finds_its_path_taken_is_not_waited_for_and_the_next_save_meets(tmp_path, taken):
    text = script("""
    if process == int(sys.argv[3]):
        os.makedirs(f"{directory()}/{process}")
    told(lambda: rps.save(f"{directory()}/{process}", make(1), config={"commit_timeout_secs": 6000}))
    meet("ended")
    rps.save(f"{directory()}/next", make(2))
    """)
    results = run(text, 2, args=[str(tmp_path), "6000", str(taken)])
    assert f"process {taken} will not take part: its save could not begin" in results[1 - taken].said[0]
    assert all("exists already and is not overwritten" in result.said[0] for result in results)
    assert rps.load(tmp_path / "next").keys() == {"w", "b"}


@pytest.mark.parametrize("unlucky", [0, 1])
def test_who_has_no_thread_for_a_save_is_not_waited_for_and_the_next_try_meets(tmp_path, unlucky):
    text = script("""
    import threading
    start, refused = threading.Thread.start, []
    def refuse(thread):
        if thread.name == "rpsave-1" and process == int(sys.argv[3]) and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)
    threading.Thread.start = refuse
    with rps.CheckpointCallback(config) as checkpoint:
        def save():
            checkpoint(1, make(1), force=True)
            checkpoint.wait()
        told(save)
        meet("told")
        save()
        say(checkpoint.all_steps())
    """)
    results = run(text, 2, args=[str(tmp_path), "6000", str(unlucky)])
    for result in results:
        assert "can't start new thread" in result.said[0]
        assert result.said[1] == "[1]"


def test_without_the_preemption_service_no_signal_is_watched_and_saves_go_on(tmp_path):
    text = script("""
    with rps.CheckpointCallback(config) as checkpoint:
        checkpoint(1, make(1))
        checkpoint.wait()
        say(checkpoint.all_steps(), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    """)
    for result in run(text, 2, args=[str(tmp_path), "60"], env={"JAX_ENABLE_PREEMPTION_SERVICE": "0"}):
        assert result.said == ["[1] True"]
        assert "preemption signals are not watched: jax_enable_preemption_service is off" in result.output


def test_under_a_budget_all_processes_save_in_the_same_groups(tmp_path):
    """Also where only process 0 has host values to copy."""
    text = script("""
    host = np.arange(2000, dtype=np.float32)
    def state(step):
        return {**make(step), "host": host + step, "more": [make(step + n) for n in range(4)]}
    with rps.CheckpointCallback({**config, "max_staging_gb": 5e-6}) as checkpoint:
        for step in (1, 2):
            checkpoint(step, state(step))
        checkpoint.wait()
        say(checkpoint._saver._snapshotter.groups)
    """)
    results = run(text, 2, devices=2, args=[str(tmp_path), "60"])
    assert results[0].said == results[1].said
    assert int(results[0].said[0]) > 1
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    found = rps.load(tmp_path)
    assert (found["host"] == np.arange(2000, dtype=np.float32) + 2).all()
    for n, part in enumerate([found, *found["more"]]):
        assert (part["w"] == values + (2 if n == 0 else 1 + n)).all()
