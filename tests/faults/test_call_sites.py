"""Each call of a save that changes the file system fails in turn, in our code and in TensorStore's."""

import json
import re

import pytest

from tests import faults
from tests.faults import rig
from tests.faults.sizes import SIZES


@pytest.mark.timeout(300 + SIZES.calls)
def test_whatever_call_fails_the_step_before_is_whole_and_the_next_save_works(tmp_path, each_engine, record_property):
    done = faults.run_python(
        """
        import pathlib, sys
        from tests.faults.call_sites import main

        main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
        """,
        tmp_path / "run",
        SIZES.calls,
        timeout=240 + SIZES.calls,
        **rig.environment(tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    failed = {outcome["call"].split()[0] for outcome in outcomes if not outcome["committed"]}
    assert {"fsync", "rename"} <= failed
    assert {"write", "writev", "pwrite64"} & failed if each_engine == "tensorstore" else "pwritev64v2" in failed
    # Harmless: deletions after the commit, of who wrote the step and of one that no rule keeps; to make what is there.
    deletion = rf"{re.escape(str(tmp_path))}/run(/\d+(/\.rpsave-writing|\.orbax-checkpoint-tmp-deleted-.*)?)?$"
    for outcome in outcomes:
        assert not outcome["committed"] or re.search(rf"^mkdir |^none: | {deletion}", outcome["call"]), outcome
    record_property("faults injected", len(outcomes))
