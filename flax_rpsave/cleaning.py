"""What goes from a run's directory: what interrupted saves left, and the steps that no rule keeps.

Runs on the thread of a save in process 0, and never fails one: what could not be removed is tried again. A step that
goes is hidden before the other processes hear of the commit: from then on all see what the rules leave. Its files are
deleted after that.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Container, Iterator, Mapping
from typing import Any

from flax_rpsave import commit
from flax_rpsave._foreign import close_match
from flax_rpsave.config import CheckpointConfig
from flax_rpsave.directory import Directory
from flax_rpsave.items import has_checkpoint
from flax_rpsave.retention import steps_to_delete

logger = logging.getLogger("flax_rpsave")


class Cleaner:
    """Cleans a run's directory.

    Args:
      root: The directory.
      config: With the rules of what is kept.
    """

    def __init__(self, root: Directory, config: CheckpointConfig):
        self._root = root
        self._config = config
        self._cleaned = False
        self._known: set[int] = set()  # committed steps as of this run's last save, or its beginning
        self._metrics: dict[int, Mapping[str, Any] | None] = {}  # of those, where a rule asks for them
        self._given: set[str] = set()  # names of metrics that any step had
        self._checkpoints: set[int] = set()  # those of which it is known that they are
        self._hidden: list[Directory] = []  # no steps any more; their files are still there
        self._spared: dict[str, float] = {}  # leftovers that may be another run's saves, and when they were first seen
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

    def hide_unkept(self, step: int, nonce: str, damaged: Container[int]) -> None:
        """Has the steps that no rule keeps be none any more.

        Args:
          step: That was committed.
          nonce: Of its save.
          damaged: Steps that count for none.
        """
        if self._config.max_to_keep is None:
            return
        with self._harmless(step):
            there = self._noted_steps(step)
            self._metrics.pop(step, None)  # of a damaged step that this one has replaced
            known: dict[int, Mapping[str, Any] | None] = {}
            for s, name in there.items():
                with self._harmless(step):  # or one directory that cannot be looked at would end all cleaning
                    if s == step or (s not in damaged and self._may_go(s, name)):
                        known[s] = self._metrics_of(s, name)
            self._metrics = known
            doomed = steps_to_delete(
                self._metrics,
                max_to_keep=self._config.max_to_keep,
                keep_period=self._config.keep_period,
                keep_best=self._config.keep_best,
            )
            self._warn_of_metric(bool(doomed))
            for s in doomed:
                with self._harmless(step):
                    self._hidden.append(commit.hide_step(self._root, there[s], nonce))
                    logger.debug("step %d deleted", s)

    def delete_hidden(self, step: int) -> None:
        """Deletes the files of what was hidden, once the others have heard of the commit.

        Args:
          step: That was committed.
        """
        if self._config.max_to_keep is None:  # else they were looked at before, while the others waited
            with self._harmless(step):
                self._noted_steps(step)
        for place in tuple(self._hidden):
            with self._harmless(step):
                commit.discard(place)
                self._hidden.remove(place)

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

    def _metrics_of(self, step: int, name: str) -> Mapping[str, Any] | None:
        """A step's metrics, which are read once; None where no rule asks for them."""
        if not self._config.keep_best:
            return None
        if (metrics := self._metrics.get(step)) is None:
            metrics = commit.read_metrics(self._root / name)
            self._given.update(metrics)
        return metrics

    def _may_go(self, step: int, name: str) -> bool:
        """Whether there is a checkpoint in a step's directory: others may have made directories named by numbers."""
        if step not in self._checkpoints and has_checkpoint(self._root / name):
            self._checkpoints.add(step)
        return step in self._checkpoints

    def _warn_of_metric(self, some_go: bool) -> None:
        """Says once that no step has the metric that the best are to be told by."""
        rule, given = self._config.keep_best, self._given
        # Where no metric was given yet, one may follow; but a step that goes will not come back for it.
        if rule is None or rule.metric in given or not (given or some_go) or self._warned_of_metric:
            return
        self._warned_of_metric = True
        meant = close_match(rule.metric, given)
        logger.warning(
            "checkpoint.keep_best keeps nothing so far: no step has the metric %r; those given are %s%s",
            rule.metric, ", ".join(map(repr, sorted(given))) or "none", f": {meant}" if meant else "",
        )  # fmt: skip

    @contextlib.contextmanager
    def _harmless(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the step is committed, whatever goes wrong here
            logger.warning("cleaning %s after step %d failed, tried again later: %s", self._root, step, error)
