"""What the pages' tables are made of: values of a results file, medians with their spread, markdown."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Results = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A quantity of the results: its column heading, and where its values lie.

    Attributes:
        heading: column heading with the unit.
        kind: kind of trial; its list of runs is `kind + "s"`.
        field: name in a run.
        first: the first run of each process instead of the later, warm ones.
        unit: what the stored value is divided by.
        digits: decimals shown.
    """

    heading: str
    kind: str
    field: str
    first: bool = False
    unit: float = 1.0
    digits: int = 2

    def values(self, results: Results, case: str, peer: str) -> list[float]:
        found = []
        for trial in trials(results, self.kind, case, peer):
            first, *warm = trial[self.kind + "s"]
            runs = [first] if self.first else warm
            found += [run[self.field] / self.unit for run in runs if self.field in run]
        return found


def trials(results: Results, kind: str, case: str, peer: str) -> list[dict[str, Any]]:
    """The trials that did what they were to do."""
    wanted = {"kind": kind, "case": case, "peer": peer, "error": None}
    return [trial for trial in results["trials"] if wanted.items() <= trial.items()]


def spread(values: Sequence[float], digits: int) -> str:
    """Median with min and max; a dash where nothing was measured."""
    if not values:
        return "–"
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low}–{high})"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A markdown table; all columns but the first are right-aligned."""
    rule = ["---"] + ["---:"] * (len(headings) - 1)
    return [f"| {' | '.join(row)} |" for row in (headings, rule, *rows)]
