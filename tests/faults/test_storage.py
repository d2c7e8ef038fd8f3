"""File systems that are full, read-only or slow, and directories that vanish or are shared, under a running loop."""

import errno
import re
import shutil

import pytest

import flax_rpsave as rps
from flax_rpsave.directory import FileDirectory
from tests import faults
from tests.faults import rig
from tests.faults.runs import assert_is_of, config, load_as_stock, state_at


def check(root, steps):
    """These steps lie there, whole, and nothing else."""
    assert sorted(path.name for path in root.iterdir()) == sorted(map(str, steps))
    for step in steps:
        assert_is_of(rps.load(root, state_at(0), step=step), step)
    assert_is_of(load_as_stock(root, steps[-1]), steps[-1], exactly=False)


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_a_loop_whose_disk_fills_up_during_save_3_goes_on_or_raises_as_it_was_told_report_58(
    tmp_path, on_error, caplog
):
    root = tmp_path / "disk" / "run"
    raised = []
    with (
        faults.mounted(tmp_path / "disk", "size=3m"),  # for two states
        rps.CheckpointCallback(config(root, on_error=on_error)) as checkpoint,
    ):
        for step in range(1, 8):
            if step == 6:
                check(root, [1, 2])
                faults.remount(tmp_path / "disk", "size=32m")
            try:
                checkpoint(step, state_at(step))
                checkpoint.wait()
            except rps.SaveError as error:
                raised.append((step, str(error)))
        check(root, [1, 2, 6, 7])
    said = [(step, message) for step, message in raised] or [
        (int(message.split()[2].rstrip(":")), message)
        for record in caplog.records
        if "training goes on" in (message := record.getMessage())
    ]
    assert [step for step, _ in said] == [3, 4, 5]
    assert (on_error == "raise") == bool(raised)
    for step, message in said:
        assert re.search(rf"step {step} was not saved to {root}/{step}: .*No space left on device", message)


def test_a_disk_full_of_an_interrupted_save_has_room_for_the_next_report_32(tmp_path):
    root = tmp_path / "disk" / "run"
    with faults.mounted(tmp_path / "disk", "size=3m"):
        leftover = root / "1.orbax-checkpoint-tmp-deadbeef"
        leftover.mkdir(parents=True)
        (leftover / "data").write_bytes(bytes(2 << 20))
        with rps.CheckpointCallback(config(root)) as checkpoint:
            assert checkpoint.resume(state_at(0))[1] == 0
            assert leftover.exists()
            assert checkpoint(1, state_at(1))
        check(root, [1])


@pytest.mark.usefixtures("each_engine")
def test_a_file_system_that_becomes_read_only_fails_the_save_and_not_the_run_report_58(tmp_path):
    root = tmp_path / "disk" / "run"
    with (
        faults.mounted(tmp_path / "disk", "size=32m"),
        rps.CheckpointCallback(config(root, on_error="log")) as checkpoint,
    ):
        checkpoint(1, state_at(1))
        checkpoint.wait()
        faults.remount(tmp_path / "disk", "ro")
        before = faults.files_in(root)
        assert checkpoint(2, state_at(2))
        checkpoint.wait()
        assert faults.files_in(root) == before
        faults.remount(tmp_path / "disk", "rw")
        assert checkpoint(3, state_at(3))
        checkpoint.wait()
        check(root, [1, 3])


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize("when", ["between two saves", "during a save"])
def test_a_directory_that_is_deleted_under_the_run_is_made_again(tmp_path, when):
    root = tmp_path / "run"
    with rps.CheckpointCallback(config(root)) as checkpoint:
        checkpoint(1, state_at(1))
        checkpoint.wait()
        if when == "during a save":
            with faults.gated_writer() as gate:
                checkpoint(2, state_at(2))
                gate.wait_reached()
                shutil.rmtree(root)
                gate.open()
                with pytest.raises(rps.SaveError, match=rf"{root}/2"):
                    checkpoint.wait()
            assert checkpoint.all_steps() == []
        else:
            shutil.rmtree(root)
        assert checkpoint(3, state_at(3))
        checkpoint.wait()
        check(root, [3])


def test_a_step_whose_name_cannot_be_made_durable_is_not_there_and_can_be_saved_again(tmp_path, monkeypatch):
    root = tmp_path / "run"
    sync = FileDirectory.sync

    def failing(directory):
        if directory.path == root and (root / "2").exists():
            raise OSError(errno.EIO, "Input/output error")
        sync(directory)

    with rps.CheckpointCallback(config(root)) as checkpoint:
        checkpoint(1, state_at(1))
        checkpoint.wait()
        with monkeypatch.context() as patch:
            patch.setattr(FileDirectory, "sync", failing)
            checkpoint(2, state_at(2))
            with pytest.raises(rps.SaveError, match=rf"step 2 was not saved to {root}/2: .*Input/output error"):
                checkpoint.wait()
        check(root, [1])
        assert checkpoint(2, state_at(2), force=True)
        checkpoint.wait()
        check(root, [1, 2])


@pytest.mark.usefixtures("each_engine")
def test_on_slow_storage_the_loop_goes_on_and_what_is_saved_is_the_state_of_the_call(tmp_path):
    done = faults.run_python(
        """
        import pathlib, sys
        import numpy as np
        import flax_rpsave as rps
        from tests.faults.rig import Rig
        from tests.faults.runs import config, state_at

        root = pathlib.Path(sys.argv[1])
        rig = Rig()
        with rps.CheckpointCallback(config(root, save_interval_steps=1_000_000)) as checkpoint:
            checkpoint(1_000_000, state_at(1_000_000))
            checkpoint.wait()
            rig.watch(root)
            rig.delay(0.2)
            state, step = state_at(2_000_000), 2_000_000
            while checkpoint.latest_step() == 1_000_000:
                checkpoint(step, state)
                state["large"] += 1  # in place, while the save has only begun to write it
                step += 1
                if step == 2_000_020:
                    rig.delay(0)
            checkpoint.wait()
            print(len(rig.calls()) > 20, step > 2_000_020, checkpoint.all_steps())
        """,
        tmp_path / "run",
        **rig.environment(tmp_path),
    )
    assert done.stdout == "True True [1000000, 2000000]\n", done.stderr
    check(tmp_path / "run", [1_000_000, 2_000_000])


@pytest.mark.usefixtures("each_engine")
def test_two_callbacks_on_one_directory_damage_nothing_and_delete_no_more_than_each_should(tmp_path):
    root = tmp_path / "run"
    first, second = (rps.CheckpointCallback(config(root, max_to_keep=3)) for _ in range(2))
    refused = []
    with first, second:
        for step in range(1, 13):
            (first if step % 2 else second)(step, state_at(step))
        first.wait()
        second.wait()
        for step in (20, 21):  # both at once: one of them, or none where each finds the other's
            for checkpoint in (first, second):
                try:
                    checkpoint(step, state_at(step))
                except rps.StepOrderError as error:
                    refused.append(error)
            for checkpoint in (first, second):
                try:
                    checkpoint.wait()
                except rps.SaveError as error:
                    refused.append(error)
    assert [f"{root}/{step}" in str(error) for step, error in zip((20, 21), refused, strict=True)] == [True, True]
    check(root, [12, 20, 21])
