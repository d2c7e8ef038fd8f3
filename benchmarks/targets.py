"""What "it is done when" asks for: ours against a peer, the machine or the state, with a verdict."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from benchmarks.peers import PEERS
from benchmarks.tables import Measure, Results, table, trials

_YARDSTICKS = {
    "state": "the state's bytes",
    "gigabytes": "the state's GB",
    "memcpy": "a memcpy of the state",
    "direct_write": "a raw O_DIRECT write of it",
    "direct_read": "a raw O_DIRECT read of it",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A line of "it is done when": the median of ours ÷ that of something else is to be at most `limit`.

    Attributes:
        label: what is compared.
        measure: of ours; of a peer too.
        against: a peer, a limit of the machine (its seconds), "state" (its bytes) or "gigabytes" (of the state).
        limit: the most that the ratio may be.
    """

    label: str
    measure: Measure
    against: str
    limit: float

    def row(self, results: Results, case: str) -> list[str]:
        """The line of the table; empty where a side was not measured."""
        ours, theirs = self.measure.values(results, case, "rpsave"), self._theirs(results, case)
        label = PEERS[self.against].label if self.against in PEERS else _YARDSTICKS[self.against]
        return verdict(self.label, label, ours, theirs, self.limit)

    def _theirs(self, results: Results, case: str) -> list[float]:
        if self.against in PEERS:
            return self.measure.values(results, case, self.against)
        if self.against in ("state", "gigabytes"):
            return [results["cases"][case]["state_bytes"] / (self.measure.unit if self.against == "state" else 1e9)]
        measured = [trial["limits"][self.against] for trial in trials(results, "machine", case, "")]
        return [run["secs"] for run in measured if run]


def verdict(label: str, against: str, ours: Sequence[float], theirs: Sequence[float], limit: float) -> list[str]:
    """A row of `verdicts`: the ratio of the medians, and whether it is at most `limit`; empty without two sides."""
    if not ours or not theirs:
        return []
    least = statistics.median(theirs)
    if least <= 0:  # a difference of times may be, where what is looked for is less than the noise
        return [label, against, "–", f"≤ {limit:.3g}", "not measurable"]
    ratio = statistics.median(ours) / least
    return [label, against, f"{ratio:.3f}", f"≤ {limit:.3g}", "met" if ratio <= limit else "**missed**"]


def verdicts(rows: Iterable[Sequence[str]]) -> list[str]:
    """The table of the rows that are not empty."""
    return table(["median of ours ÷", "that of", "measured", "target", ""], filter(None, rows))
