"""Byte-level text, and batches of it in a shuffled order that a checkpoint can hold."""

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class DataConfig:
    """What to train on: the `data:` section of the YAML file."""

    batch_size: int
    """Sequences of a step, over all devices."""
    path: str | None = None
    """Any file; null takes the sources of the Python standard library."""
    max_bytes: int | None = None
    """Only the text's first bytes; null takes all."""
    seed: int = 0


def load_tokens(config: DataConfig) -> np.ndarray:
    """The text as uint8 tokens, a byte each; source files in the order of their names, with a zero byte after each."""
    if config.path is not None:
        text = Path(config.path).read_bytes()
    else:
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(source.read_bytes() + b"\0" for source in sources)
    return np.frombuffer(text[: config.max_bytes], np.uint8)


class ShuffledBatches:
    """Endless iterator over one process's rows of batches, `[batch_size // processes, context + 1]` int32 tokens.

    The batches are the same for any number of processes, and their rows are inputs and targets, overlapping.

    The text is cut into windows; an epoch is one pass over them in an order that depends on `(seed, epoch)` only, and
    an epoch's last windows that fill no batch are left out. The state is therefore two counters, which
    `get_state()` returns and `set_state()` takes; it also says what it counts, so that the position in one text is
    never used in another.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        batch_size: int,
        context: int,
        seed: int = 0,
        process: int = 0,
        processes: int = 1,
    ):
        if batch_size % processes:
            raise ValueError(f"{processes} processes must divide the batch size, got {batch_size}")
        self._tokens = tokens
        self._batch_size = batch_size
        self._rows = batch_size // processes
        self._first_row = process * self._rows
        self._context = context
        self._windows = (len(tokens) - 1) // context
        if self._windows < batch_size:
            raise ValueError(f"a batch takes {batch_size} windows of {context} tokens, got a text of {self._windows}")
        self._identity = {
            "batch_size": batch_size,
            "context": context,
            "seed": seed,
            "tokens": len(tokens),
            "crc32": zlib.crc32(tokens),
        }
        self._move_to(epoch=0, batch=0)

    def __iter__(self) -> "ShuffledBatches":
        return self

    def __next__(self) -> np.ndarray:
        if (self._batch + 1) * self._batch_size > self._windows:
            self._move_to(epoch=self._epoch + 1, batch=0)
        first = self._batch * self._batch_size + self._first_row
        starts = self._order[first : first + self._rows, None] * self._context
        self._batch += 1
        return self._tokens[starts + np.arange(self._context + 1)].astype(np.int32)

    def get_state(self) -> dict[str, Any]:
        """Where the iterator stands: JSON-able."""
        return {"epoch": self._epoch, "batch": self._batch, "of": self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where `get_state()` was called.

        Raises:
            ValueError: the state counts batches of another text, size or seed.
        """
        if state["of"] != self._identity:
            raise ValueError(f"the data state must be of {self._identity}, got one of {state['of']}")
        self._move_to(epoch=state["epoch"], batch=state["batch"])

    def _move_to(self, *, epoch: int, batch: int) -> None:
        self._epoch, self._batch = epoch, batch
        self._order = np.random.default_rng([self._identity["seed"], epoch]).permutation(self._windows)
