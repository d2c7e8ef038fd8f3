"""What the pages' tables are made of: values of a results file, medians with their spread, markdown."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

Results = dict[str, Any]

NOTHING = "–"
"""In a table's cell, where nothing was measured."""
AMOUNTS: Mapping[str, Callable[[dict[str, Any]], float]] = {
    "state": lambda case: case["state_bytes"],
    "gigabytes": lambda case: case["state_bytes"] / 1e9,
    "slices": lambda case: case["state_bytes"] / case["processes"],
}
"""What a case has so much of: its state's bytes, its state's GB, the bytes that each process owns slices of."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """A quantity of the results: its column heading, and where its values lie.

    Attributes:
        heading: column heading with the unit.
        kind: kind of trial; its list of runs is `kind + "s"`.
        field: name in a run.
        first: the first run of each process instead of the later, warm ones.
        unit: what the stored value is divided by.
        per: one of `AMOUNTS` that it is divided by, too.
        digits: decimals shown.
    """

    heading: str
    kind: str
    field: str
    first: bool = False
    unit: float = 1.0
    per: str | None = None
    digits: int = 2

    def values(self, results: Results, case: str, peer: str) -> list[float]:
        divisor = self.unit * (AMOUNTS[self.per](results["cases"][case]) if self.per else 1)
        found = []
        for trial in trials(results, self.kind, case, peer):
            runs = trial[self.kind + "s"]
            runs = runs[:1] if self.first else runs[1:]
            found += [run[self.field] / divisor for run in runs if self.field in run]
        return found


def trials(results: Results, kind: str, case: str, peer: str) -> list[dict[str, Any]]:
    """The trials that did what they were to do."""
    wanted = {"kind": kind, "case": case, "peer": peer, "error": None}
    return [trial for trial in results["trials"] if wanted.items() <= trial.items()]


def engines_of(results: Results, case: str, peer: str) -> str:
    """What put the warm saves into storage; of processes that did not all have the same, how many had which."""
    names = []
    for save in (save for trial in trials(results, "save", case, peer) for save in trial["saves"][1:]):
        mix = Counter(stats["engine"] for stats in save.get("own_stats", []) if "engine" in stats)
        names += [name if len(mix) == 1 else f"{count} × {name}" for name, count in sorted(mix.items())]
    return ", ".join(dict.fromkeys(names)) or NOTHING


def load(results: Results, cases: Collection[str]) -> list[str]:
    """How busy the machine was when the turns of `cases` began, as a paragraph; empty where nobody looked."""
    loads = [trial["load_before"] for trial in results["trials"] if trial["case"] in cases and "load_before" in trial]
    if not loads:
        return []
    return [f"Load average before a turn, which the turns before it are in: {min(loads):.1f} to {max(loads):.1f}.", ""]


def spread(values: Sequence[float], digits: int) -> str:
    """Median with min and max; `NOTHING` where nothing was measured."""
    if not values:
        return NOTHING
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low}–{high})"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A markdown table; all columns but the first are right-aligned."""
    rule = ["---"] + ["---:"] * (len(headings) - 1)
    return [f"| {' | '.join(row)} |" for row in (headings, rule, *rows)]


def without_blanks(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The table without the columns that no row has a figure for; empty without rows."""
    kept = [column for column in range(len(headings)) if column == 0 or any(row[column] != NOTHING for row in rows)]
    picked = [[row[column] for column in kept] for row in (headings, *rows)]
    return table(picked[0], picked[1:]) if rows else []
