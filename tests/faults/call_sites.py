"""Saves in which one call to the file system fails, each another; to be run with the rig.

Checks each outcome itself, and prints a JSON line of it.
"""

import errno
import json
import os
import pathlib

import flax_rpsave as rps
from tests.faults.rig import Rig
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


def chosen(calls: list[str], wanted: int) -> list[tuple[str, int]]:
    """(function, which of its calls) of so many calls, evenly spread, and of the first of each function."""
    count = len(calls)
    spread = {round(k * (count - 1) / (wanted - 1)) for k in range(wanted)} if wanted < count else set(range(count))
    functions = [call.split()[0] for call in calls]
    numbers = sorted(spread | {functions.index(function) for function in functions})
    return [(functions[k], functions[:k].count(functions[k])) for k in numbers]


def main(root: pathlib.Path, wanted: int) -> None:
    rig = Rig()
    with rps.CheckpointCallback(config(root, max_to_keep=2)) as checkpoint:
        for step in (1, 2, 3):
            rig.watch(root)
            assert save(checkpoint, step) is None
        calls = rig.calls()  # of a clean save that deletes an older step, too
        both = wanted >= len(calls)
        for count, (function, number) in enumerate(chosen(calls, wanted)):
            for code in _CODES if both else [_CODES[count % 2]]:
                onwards = count % 4 == 3  # what cleans up after a failure fails then, too
                step += 1
                rig.watch(root)
                rig.fail(function, number, code, onwards=onwards)
                error = save(checkpoint, step)
                name = rig.failed() or "none: this save had fewer of them"
                rig.fail("")
                where = f"step {step}, {function} {number} ({name}): {error}"
                if error is None:
                    assert step in checkpoint.all_steps(), where
                    check_restorable(root, step)
                else:
                    if step in checkpoint.all_steps():  # its sync failed, and so did the way back: it is whole
                        assert onwards and name == f"fsync {root}", where  # noqa: PT018
                        check_restorable(root, step)
                    assert f"step {step} was not saved to {root}/{step}: " in str(error), where
                    assert os.strerror(code) in str(error), where
                    check_restorable(root, step - 1)
                outcome = {"call": name, "code": errno.errorcode[code], "committed": error is None, "said": str(error)}
                print(json.dumps(outcome), flush=True)
                step += 1
                assert save(checkpoint, step) is None, where
                check_restorable(root, step)
