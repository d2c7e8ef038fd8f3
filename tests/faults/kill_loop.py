"""A loop that saves every step, and is to be killed. It says what it resumed and what it committed."""

import os
import pathlib

import flax_rpsave as rps
from tests.faults.runs import assert_is_of, config, state_at


def main(root: pathlib.Path) -> None:
    def say(*words: object) -> None:
        os.write(1, f"{' '.join(map(str, words))}\n".encode())  # at once, and whole

    with rps.CheckpointCallback(
        config(root, max_to_keep=3), on_commit=lambda stats: say("committed", stats.step)
    ) as checkpoint:
        state, step = checkpoint.resume(state_at(0))
        assert_is_of(state, step)
        say("resumed", step)
        first = True
        while True:
            step += 1
            checkpoint(step, state_at(step))
            if first:
                checkpoint.wait()
                say("there", *sorted(os.listdir(root)))
                first = False
