"""Saves in which one call to the file system fails, each another; to be run with the rig.

Checks each outcome itself, and prints a JSON line of it.
"""

import errno
import json
import os
import pathlib

import flax_rpsave as rps
from tests.faults.rig import EVER, Rig
from tests.faults.runs import assert_is_of, config, load_as_stock, state_at

_CODES = (errno.EIO, errno.ENOSPC)


def save(checkpoint: rps.CheckpointCallback, step: int) -> rps.SaveError | None:
    """The error of a save, once it has ended."""
    try:
        checkpoint(step, state_at(step))
        checkpoint.wait()
    except rps.SaveError as error:
        return error
    return None


def check_restorable(root: pathlib.Path, step: int) -> None:
    assert_is_of(rps.load(root, state_at(0), step=step), step)
    assert_is_of(load_as_stock(root, step), step, exactly=False)


def chosen(calls: list[str], wanted: int) -> list[int]:
    """Numbers of so many calls, evenly spread, and of the first of each function."""
    count = len(calls)
    spread = {round(k * (count - 1) / (wanted - 1)) for k in range(wanted)} if wanted < count else set(range(count))
    functions = [call.split()[0] for call in calls]
    return sorted(spread | {functions.index(function) for function in functions})


def main(root: pathlib.Path, wanted: int) -> None:
    rig = Rig()
    with rps.CheckpointCallback(config(root, max_to_keep=2)) as checkpoint:
        for step in (1, 2, 3):
            rig.watch(root)
            assert save(checkpoint, step) is None
        calls = rig.calls()  # of a clean save that deletes an older step, too
        both = wanted >= len(calls)
        for number, call in enumerate(chosen(calls, wanted)):
            for code in _CODES if both else [_CODES[number % 2]]:
                last = EVER if number % 4 == 3 else call  # what cleans up after a failure fails then, too
                step += 1
                rig.watch(root)
                rig.fail(call, last, code)
                error = save(checkpoint, step)
                calls = rig.calls()
                rig.fail(0, -1)
                name = calls[call] if call < len(calls) else "none: this save had fewer calls"
                where = f"step {step}, call {call} ({name}): {error}"
                if error is None:
                    assert step in checkpoint.all_steps(), where
                    check_restorable(root, step)
                else:
                    if step in checkpoint.all_steps():  # its sync failed, and so did the way back: it is whole
                        assert last == EVER and name == f"fsync {root}", where  # noqa: PT018
                        check_restorable(root, step)
                    assert f"step {step} was not saved to {root}/{step}: " in str(error), where
                    assert os.strerror(code) in str(error), where
                    check_restorable(root, step - 1)
                outcome = {"call": name, "code": errno.errorcode[code], "committed": error is None, "said": str(error)}
                print(json.dumps(outcome), flush=True)
                step += 1
                assert save(checkpoint, step) is None, where
                check_restorable(root, step)
