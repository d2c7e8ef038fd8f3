"""What a run tells: a progress bar, a line a save, and a log of JSON lines."""

import json
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

import flax_rpsave as rps


class Report:
    """The progress bar of a run and its log file.

    `step` is called by the training loop and `saved` by the background thread that commits, so a lock keeps lines of
    the log whole. Losses are logged as hexadecimal floats: exact, so that two runs can be compared bit for bit. Of
    several processes all but one are `quiet`.
    """

    def __init__(self, path: str | Path | None, *, num_steps: int, quiet: bool = False):
        self._quiet = quiet
        self._path = None if quiet else path
        self._num_steps = num_steps
        self._lock = threading.Lock()
        self._bar = tqdm(disable=True)  # until the first step is known

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._bar.close()

    def start(self, step: int) -> None:
        """The run starts, or goes on, after `step` steps."""
        if self._quiet:
            return
        tqdm.write(f"training from step {step} to {self._num_steps}")
        self._bar = tqdm(total=self._num_steps, initial=step, unit="step", disable=None)

    def step(self, step: int, loss: float) -> None:
        """A step was made."""
        self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self._bar.update()
        self._write({"step": step, "loss": loss.hex()})

    def saved(self, stats: rps.SaveStats) -> None:
        """A step was committed: the callback's `on_commit`."""
        blocked_ms = (stats.waited_secs + stats.blocking_secs) * 1e3
        background_secs = stats.write_secs + stats.commit_secs
        gigabytes_per_sec = stats.bytes_written / background_secs / 1e9
        tqdm.write(
            f"saved step {stats.step}: blocked {blocked_ms:.1f} ms, {stats.bytes_written:,} bytes, "
            f"{gigabytes_per_sec:.3f} GB/s in the background"
        )
        self._write({"saved": stats.step, "blocked_ms": blocked_ms, "bytes": stats.bytes_written})

    def _write(self, line: dict[str, Any]) -> None:
        if self._path is not None:
            with self._lock, open(self._path, "a") as log:
                log.write(json.dumps(line) + "\n")
