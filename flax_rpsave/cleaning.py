"""What goes from a run's directory: what interrupted saves left, and the steps that no rule keeps.

Runs on the thread of a save in process 0, and never fails one: what could not be removed is tried again. A step that
goes is hidden before the other processes hear of the commit: from then on all see what the rules leave. Its files are
deleted after that.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from flax_rpsave import commit
from flax_rpsave._foreign import close_match
from flax_rpsave.config import CheckpointConfig
from flax_rpsave.directory import Directory
from flax_rpsave.retention import steps_to_delete

logger = logging.getLogger("flax_rpsave")


class Cleaner:
    """Cleans a run's directory.

    Args:
      root: The directory.
    """

    def __init__(self, root: Directory):
        self._root = root
        self._cleaned = False
        self._known: set[int] = set()  # committed steps as of this run's last save, or its beginning
        self._hidden: list[Directory] = []  # no steps any more; their files are still there
        self._spared: dict[str, float] = {}  # leftovers that may be another run's saves, and when they were first seen
        self._metrics: set[str] = set()  # names of those that any step had
        self._warned_of_metric = False

    def before(self, nonce: str) -> None:
        """Deletes what earlier runs left half done; before the first save, which may need the room.

        Args:
          nonce: Of the save.
        """
        if self._cleaned:
            return
        try:
            self._known = self._known or set(commit.committed_steps(self._root))
            commit.delete_leftovers(self._root, nonce, self._spared, time.monotonic())
            self._cleaned = not self._spared
        except Exception as error:  # noqa: BLE001 - no reason not to save
            logger.warning("leftovers in %s could not be removed, tried again at the next save: %s", self._root, error)

    def hide(self, step: int, nonce: str, config: CheckpointConfig, damaged: Mapping[int, Any]) -> None:
        """Has the steps that no rule keeps be none any more.

        Args:
          step: That was committed.
          nonce: Of its save.
          config: With the rules.
          damaged: Steps that count for none.
        """
        if config.max_to_keep is None:
            return
        with self._harmless(step):
            there = self._noted_steps(step)
            self._hide({s: name for s, name in there.items() if s == step or s not in damaged}, nonce, config)

    def after(self, step: int, config: CheckpointConfig) -> None:
        """Deletes what was hidden; others have heard of the commit.

        Args:
          step: That was committed.
          config: With the rules.
        """
        with self._harmless(step):
            if config.max_to_keep is None:  # else that was done already
                self._noted_steps(step)
            while self._hidden:
                commit.discard(self._hidden.pop(0))

    def _noted_steps(self, step: int) -> dict[int, str]:
        """The committed steps; says which are another run's."""
        there = commit.committed_steps(self._root)
        if others := set(there) - self._known - {step}:
            logger.warning(
                "steps %s in %s were saved by another run since this one began: give each run its directory",
                sorted(others), self._root,
            )  # fmt: skip
        self._known = set(there)
        return there

    @contextlib.contextmanager
    def _harmless(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the step is committed, whatever goes wrong here
            logger.warning("cleaning %s after step %d failed, tried again later: %s", self._root, step, error)

    def _hide(self, steps: Mapping[int, str], nonce: str, config: CheckpointConfig) -> None:
        rule = config.keep_best
        metrics = {step: commit.read_metrics(self._root / name) if rule else None for step, name in steps.items()}
        doomed = steps_to_delete(
            metrics, max_to_keep=config.max_to_keep, keep_period=config.keep_period, keep_best=rule
        )
        self._metrics.update(*(of_step or () for of_step in metrics.values()))
        # Where no metric was given yet, one may follow; but a step that goes will not come back for it.
        if rule and rule.metric not in self._metrics and (self._metrics or doomed) and not self._warned_of_metric:
            self._warned_of_metric = True
            meant = close_match(rule.metric, self._metrics)
            logger.warning(
                "checkpoint.keep_best keeps nothing so far: no step has the metric %r; those given are %s%s",
                rule.metric, ", ".join(map(repr, sorted(self._metrics))) or "none", f": {meant}" if meant else "",
            )  # fmt: skip
        for step in doomed:
            self._hidden.append(commit.hide_step(self._root, steps[step], nonce))
            logger.debug("step %d deleted", step)
