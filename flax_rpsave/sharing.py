"""Whether all processes have the same directory under the paths that they were given, which may differ.

Where they have not, no step can be saved, and what each would resume from is its own. The same happens where callbacks
are made in another order: those that talk to each other are then of different runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flax_rpsave import commit, documents
from flax_rpsave.directory import Directory
from flax_rpsave.errors import ConfigError, CorruptCheckpointError, SaveError
from flax_rpsave.reading import reading


@dataclass(frozen=True)
class View:
    """What a process sees in a run's directory.

    Attributes:
      root: The directory's path in this process.
      steps: Committed steps and the names of their directories.
      newest: Digest of the newest one's document, which has times, and ours the run; None where it has none.
    """

    root: str
    steps: Mapping[int, str]
    newest: str | None

    def as_word(self) -> Any:
        """For `of_word`, by way of JSON."""
        return {**asdict(self), "steps": list(self.steps.items())}

    @classmethod
    def of_word(cls, word: Any) -> View:
        """The view that another process has told."""
        return cls(word["root"], {int(step): str(name) for step, name in word["steps"]}, word["newest"])

    def __str__(self) -> str:
        return f"{f'steps {list(self.steps)}' if self.steps else 'no steps'} in {self.root}"


def view(root: Directory) -> View:
    """What this process sees."""
    steps = commit.committed_steps(root)
    return View(str(root), steps, _newest(root, steps))


def _newest(root: Directory, steps: Mapping[int, str]) -> str | None:
    """Digest of the document of the newest of these steps."""
    if not steps:
        return None
    step = root / steps[max(steps)]
    try:
        with reading(str(step)):
            data = step.read(documents.CHECKPOINT)
    except CorruptCheckpointError:  # which resume finds by itself
        return None
    return None if data is None else documents.digest(data)


def check_view(root: Directory, process: int, first: View) -> None:
    """Refuses to go on with other checkpoints than process 0 has.

    Raises:
      ConfigError: What this process sees is not what process 0 sees.
    """
    # The newest is asked for by its name: a network file system may list what was there some seconds ago.
    if first.newest is not None and _newest(root, first.steps) == first.newest:
        return
    own = view(root)
    if first.newest is None and own.steps == first.steps:
        return
    though = f", of which step {max(own.steps)} is another checkpoint" if own.steps == first.steps else ""
    raise ConfigError(
        f"the processes see different checkpoints: process 0 {first}, process {process} {own}{though}. "
        "checkpoint.directory must be shared by all processes, and they must make the same callbacks in the same order"
    )


def check_prepared(final: Directory, nonce: str, process: int, first_final: str) -> None:
    """Checks that a process sees what process 0 has prepared for a save, before it writes anything.

    Args:
      final: The step's directory in this process.
      nonce: Of process 0's save.
      process: This process.
      first_final: The step's directory in process 0.

    Raises:
      SaveError: Nothing of it is there.
    """
    if commit.is_prepared(final, nonce):
        return
    raise SaveError(
        f"process {process} does not see at {final} what process 0 has prepared at {first_final}. "
        "The directory must be shared by all processes, and they must make the same callbacks in the same order"
    )
