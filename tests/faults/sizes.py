"""How much the tests here try: a little by default, RPSAVE_SOAK as a share of all with `scripts/soak`."""

import os
from dataclasses import dataclass, fields

SHARE_VARIABLE = "RPSAVE_SOAK"
SEED_VARIABLE = "RPSAVE_SEED"


@dataclass(frozen=True)
class Sizes:
    """How often each thing is tried, with each engine or layout.

    Attributes:
      kills: Times that a loop is killed.
      calls: Calls of a save that fail, spread over all; a save has fewer than the full size.
      saves: Saves of one run that must not grow.
      mutants: Damaged checkpoints, of each layout.
      examples: Texts and mappings given to the configuration, each.
    """

    kills: int
    calls: int
    saves: int
    mutants: int
    examples: int


SMALL = Sizes(kills=2, calls=12, saves=30, mutants=40, examples=50)
FULL = Sizes(kills=200, calls=1000, saves=500, mutants=2000, examples=5000)


def _sizes(share: str | None) -> Sizes:
    if share is None:
        return SMALL
    names = [field.name for field in fields(Sizes)]
    return Sizes(**{name: max(getattr(SMALL, name), round(float(share) * getattr(FULL, name))) for name in names})


SIZES = _sizes(os.environ.get(SHARE_VARIABLE))
SEED = int(os.environ.get(SEED_VARIABLE, "0")) or int.from_bytes(os.urandom(4))
"""Of what is tried at random: another each time, unless RPSAVE_SEED gives it. A test that uses it prints it."""
