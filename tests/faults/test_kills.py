"""A loop that saves every step is killed at random instants; each time another process goes on from what is there."""

import contextlib
import random
import re
import subprocess

import orbax.checkpoint as ocp
import pytest

import flax_rpsave as rps
from tests import faults
from tests.faults.runs import assert_is_of, load_as_stock, state_at
from tests.faults.sizes import SEED, SIZES

LONGEST_SECS = 0.5  # some ten saves


def check(root, reported):
    """What lies there after a kill: whole steps, the newest no older than was reported; returns that."""
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        steps = sorted(manager.all_steps())
    assert steps == sorted(int(path.name) for path in root.iterdir() if re.fullmatch(r"\d+", path.name))
    assert max(steps, default=0) >= reported
    for step in steps:
        assert_is_of(rps.load(root, state_at(0), step=step), step)
    if steps:
        assert_is_of(load_as_stock(root, steps[-1]), steps[-1], exactly=False)
    return max(steps, default=0)


@pytest.mark.timeout(300 + 10 * SIZES.kills)
def test_after_a_kill_at_any_instant_the_newest_step_is_whole_and_no_older_than_reported(
    tmp_path, each_engine, record_property
):
    print(f"RPSAVE_SEED={SEED}")
    chance = random.Random(SEED)
    root = tmp_path / "run"
    root.mkdir()
    newest = under_way = 0
    for kill in range(SIZES.kills):
        loop = faults.start_python(
            "import pathlib, sys; from tests.faults.kill_loop import main; main(pathlib.Path(sys.argv[1]))", root
        )
        lines = []
        # Now and then already while it resumes, or saves and cleans for the first time.
        until = chance.choice(["resumed", "resumed", "there", "there", "there", "there"])
        while not lines or not lines[-1].startswith(until):
            lines.append(loop.stdout.readline())
            assert lines[-1], f"kill {kill}: {loop.communicate()[1]}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            loop.wait(timeout=chance.uniform(0, LONGEST_SECS))
        loop.kill()
        said = [line.split() for line in lines + loop.communicate()[0].splitlines()]
        told = {words[0]: words[1:] for words in said if words}
        assert int(told["resumed"][0]) == newest, f"kill {kill}"
        leftover = [name for name in told.get("there", []) if not re.fullmatch(r"\d+", name)]
        assert not leftover, f"kill {kill}"  # of the process killed before
        newest = check(root, int(told.get("committed", ["0"])[0]))
        under_way += any("tmp" in path.name for path in root.iterdir())
    record_property("kills survived", SIZES.kills)
    record_property("of them during a save", under_way)
