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
from flax_rpsave.errors import ConfigError, SaveError
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


def view(root: Directory, first: View | None = None) -> View:
    """What this process sees; `first`: what process 0 does, which an object store is not asked about again."""
    steps = commit.committed_steps(root, known=() if first is None else first.steps.values())
    data = None
    if steps:
        step = root / steps[max(steps)]
        with reading(str(step)):
            data = step.read(documents.CHECKPOINT)
    return View(str(root), steps, None if data is None else documents.digest(data))


def check_view(root: Directory, process: int, first: View) -> None:
    """Refuses to go on with other checkpoints than process 0 has.

    Raises:
      ConfigError: What this process sees is not what process 0 sees.
    """
    own = view(root, first)
    if (own.steps, own.newest) == (first.steps, first.newest):
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
    where = "the same path" if first_final == str(final) else str(final)
    raise SaveError(
        f"process {process} does not see what process 0 has prepared for {first_final}: its own directory is {where}. "
        "The directory must be shared by all processes, and they must make the same callbacks in the same order"
    )
