"""Which step a run goes on from, and its state, put into the form that the run wants.

Processes decide together at every turn: what is refused or fails in one is raised in all.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from flax_rpsave import commit, data_state, sharing
from flax_rpsave.agreement import Group
from flax_rpsave.config import CheckpointConfig
from flax_rpsave.directory import Directory
from flax_rpsave.errors import (
    ConfigError,
    CorruptCheckpointError,
    NoCheckpointError,
    SaveError,
    StepOrderError,
    TreeMismatchError,
)
from flax_rpsave.leaves import Leaf, flatten
from flax_rpsave.restore import Fit
from flax_rpsave.store import new_context
from flax_rpsave.stored import open_checkpoint

logger = logging.getLogger("flax_rpsave")


@dataclass(frozen=True)
class Wanted:
    """What a run asks for; see `CheckpointCallback.resume`."""

    state: Any
    init: Callable[[], Any] | None
    skip: Sequence[str]
    step: Any = None
    rewind: bool = False


@dataclass(frozen=True)
class Found:
    """What a run goes on from.

    Attributes:
      state: Its state.
      step: Its step; 0 where there was none.
      steps: All steps that were there, and the names of their directories.
      extra: What was saved beside it.
    """

    state: Any
    step: int
    steps: Mapping[int, str]
    extra: Any = None


class Resumer:
    """Finds a run's state in its directory.

    Args:
      root: The directory.
      config: Of the run.
      group: Its processes.
      nonce: Of the run, for the names of what is moved aside.
      data: The data iterator, `False`, or None.
      damaged: Gets the steps that do not verify.
    """

    def __init__(
        self,
        root: Directory,
        config: CheckpointConfig,
        group: Group,
        nonce: str,
        data: Any,
        damaged: MutableMapping[int, Directory],
    ):
        self._root = root
        self._config = config
        self._group = group
        self._nonce = nonce
        self._data = data
        self._damaged = damaged

    def resume(self, wanted: Wanted, *, begun: bool, resumed: bool) -> Found:
        """What to go on from.

        Args:
          wanted: What is asked for.
          begun: Whether this run has called before.
          resumed: Whether it has resumed before, so that steps may be its own.
        """
        first = self._view_of_process_0()
        step = None
        with self._group.channel("choosing a step").agreed():
            if not begun and not self._group.decides:  # after that each save shows whether it is shared
                sharing.check_view(self._root, self._group.process, first)
            step = self._chosen(wanted, first.steps, resumed)
        asked = self._group.channel("the step that is asked for").share([step, wanted.rewind])
        if differing := [p for p, word in enumerate(asked) if word != asked[0]]:
            raise SaveError(
                f"resume: process 0 asks for step {asked[0][0]} with rewind={asked[0][1]}, "
                f"process {differing[0]} for step {asked[differing[0]][0]} with rewind={asked[differing[0]][1]}"
            )
        if step is not None:
            return self._resume_exactly(step, first.steps, wanted)
        if first.steps:
            return self._resume_newest(first.steps, wanted)
        with self._group.channel("making the initial state").agreed():
            state = initial(wanted.state, wanted.init)
        return Found(state, 0, {})

    def _view_of_process_0(self) -> sharing.View:
        """The steps as process 0 sees them: all processes then try the same ones."""
        word = None
        with self._group.channel("listing the steps").agreed():
            if self._group.decides:
                own = sharing.view(self._root)
                word = own.as_word()
                commit.warn_of_passed_over(self._root)
                if not own.steps:
                    commit.check_unprefixed(self._root)
        return sharing.View.of_word(self._group.channel("the steps").share(word)[0])

    def _chosen(self, wanted: Wanted, steps: Mapping[int, str], resumed: bool) -> int | None:
        """The step that is asked for, if it can be had; None for the newest."""
        if not resumed:
            check_resume_allowed(self._config, self._root, steps)
        if wanted.step is None:
            if wanted.rewind:
                raise TypeError("rewind=True moves steps aside that are newer than `step`: pass that")
            if not steps and self._config.resume == "required":
                raise NoCheckpointError(f"checkpoint.resume is 'required', but {self._root} has no committed step")
            return None
        step = as_step(wanted.step)
        if step not in steps:
            raise NoCheckpointError(f"{self._root} has no step {step}; it has {list(steps) or 'none'}")
        if (newer := [s for s in steps if s > step]) and not wanted.rewind:
            raise StepOrderError(
                f"step {step} is not the newest: {newer} would be in the way of this run. "
                "Pass rewind=True to move them aside."
            )
        return step

    def _resume_exactly(self, step: int, steps: Mapping[int, str], wanted: Wanted) -> Found:
        found = self._restore(step, steps, wanted)
        with self._group.channel("moving newer steps aside").agreed():
            for later in sorted((s for s in steps if s > step), reverse=True) if self._group.decides else ():
                moved = commit.move_aside(self._root / steps[later], "abandoned", self._nonce)
                logger.warning("step %d is moved aside to %s", later, moved)
        return found

    def _resume_newest(self, steps: Mapping[int, str], wanted: Wanted) -> Found:
        first_error: CorruptCheckpointError | None = None
        for step in sorted(steps, reverse=True):
            try:
                return self._restore(step, steps, wanted)
            except CorruptCheckpointError as error:
                logger.warning("step %d is damaged and passed over: %s", step, error)
                first_error = first_error or error
                self._damaged[step] = self._root / steps[step]
        raise CorruptCheckpointError(
            f"{self._root} has steps {list(steps)}, and none of them verifies; the newest: {first_error}. "
            "Nothing was started from zero over them: move them away if that is what you want."
        ) from first_error

    def _restore(self, step: int, steps: Mapping[int, str], wanted: Wanted) -> Found:
        group = self._group
        with group.channel(f"reading step {step}").agreed():
            # A context of its own: TensorStore caches by path, where another checkpoint may have been before.
            stored = open_checkpoint(self._root / steps[step], self._config.item, new_context())
            stored.check_step(step)
            position = data_state.stored_state(stored, self._data, group.process, group.processes)
            leaves, structure = _filled(wanted)
            fit = Fit(stored, leaves, structure, skip=wanted.skip)
            fit.read_share(group.process, group.processes)
        asked = group.channel(f"what to read of step {step}").share(fit.assignment_digest())
        if differing := [p for p, digest in enumerate(asked) if digest != asked[0]]:
            raise TreeMismatchError(
                f"step {step}: processes {differing} ask for other leaves or other shardings than process 0; "
                "`state` and `skip` must be the same in all"
            )
        restored = fit.finish(group.process, group.processes)
        # Agreed, too: else the others would train without the data of one.
        with group.channel(f"positioning the data for step {step}").agreed():
            if position is not None:
                data_state.put_back(position, self._data, stored)
        return Found(restored, step, steps, stored.own.get("extra"))


def check_resume_allowed(config: CheckpointConfig, root: Directory, steps: Mapping[int, str]) -> None:
    """Refuses to go on in a directory with steps where the configuration says so.

    Raises:
      ConfigError: It does.
    """
    if config.resume == "never" and steps:
        raise ConfigError(
            f"checkpoint.resume is 'never', but {root} has steps up to {max(steps)}; "
            "choose another directory, or set resume: auto"
        )


def as_step(step: Any) -> int:
    """A step that a loop gives, as an int.

    Raises:
      TypeError: It is none.
      StepOrderError: It is negative.
    """
    if isinstance(step, jax.Array):
        raise TypeError(
            "step must be a Python int, got a jax.Array: converting it would wait for the device in every step. "
            "Count the steps in the loop, as an int."
        )
    if isinstance(step, bool):
        raise TypeError("step must be an int, got a bool")
    try:
        value = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an int, got {type(step).__qualname__}") from None
    if value < 0:
        raise StepOrderError(f"step must not be negative, got {value}")
    return value


def initial(state: Any, init: Callable[[], Any] | None) -> Any:
    """The state where there is no checkpoint.

    Raises:
      NoCheckpointError: It has leaves without values, and nothing makes them.
    """
    if init is not None:
        return init()
    abstract = [leaf.label for leaf in flatten(state)[0] if isinstance(leaf.original, jax.ShapeDtypeStruct)]
    if abstract:
        raise NoCheckpointError(
            f"there is no checkpoint, and the state is abstract ({abstract[0]} is a ShapeDtypeStruct): "
            "pass init=, a function that makes it"
        )
    return state


def _filled(wanted: Wanted) -> tuple[list[Leaf], Any]:
    """The target's leaves; where skipped ones are abstract, `init` makes the values that they keep."""
    leaves, structure = flatten(wanted.state)
    if wanted.skip and any(isinstance(leaf.original, jax.ShapeDtypeStruct) for leaf in leaves):
        if wanted.init is None:
            raise TreeMismatchError("skipped leaves keep the target's values, but it is abstract: pass init=")
        return flatten(wanted.init())
    return leaves, structure
