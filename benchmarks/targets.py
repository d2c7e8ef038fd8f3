"""What "it is done when" asks for: ours against a peer, the machine or the state, with a verdict."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from benchmarks.measures import (
    BLOCKING,
    COMMIT,
    CPU,
    FIRST,
    FIRST_RESTORE,
    FIRST_RESTORE_AND_STEP,
    PEAK,
    READ,
    RESTORE,
    TO_HOST,
)
from benchmarks.peers import PEERS
from benchmarks.tables import AMOUNTS, NOTHING, Measure, Results, table, trials

_YARDSTICKS = {
    "state": "the state's bytes",
    "gigabytes": "the state's GB",
    "memcpy": "a memcpy of the state",
    "memcpy_slices": "a memcpy of its slices by one process alone (that of the state ÷ processes)",
    "memcpy_at_once": "a memcpy of its slices by a thread a process, all at once",
    "direct_write": "a raw O_DIRECT write of it",
    "direct_read": "a raw O_DIRECT read of it",
    "buffered_read_cold": "a raw read of it, cold, through the page cache",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A line of "it is done when": the median of ours ÷ that of something else is to be at most `limit`.

    Attributes:
        label: what is compared.
        measure: of ours; of a peer too.
        against: a peer, a limit of the machine (its seconds), "memcpy_slices", "state" (its bytes) or "gigabytes" (of
            the state); of several the one with the least median.
        limit: the most that the ratio may be; None: for information.
    """

    label: str
    measure: Measure
    against: str | Sequence[str]
    limit: float | None

    def row(self, results: Results, case: str) -> list[str]:
        """The line of the table; empty where a side was not measured."""
        names = (self.against,) if isinstance(self.against, str) else self.against
        sides = {name: found for name in names if (found := self._theirs(results, case, name))}
        if not sides:
            return []
        best = min(sides, key=lambda name: statistics.median(sides[name]))
        label = PEERS[best].label if best in PEERS else _YARDSTICKS[best]
        label = label if len(sides) == 1 else f"{label} (the best of {len(sides)})"
        return verdict(self.label, label, self.measure.values(results, case, "rpsave"), sides[best], self.limit)

    def _theirs(self, results: Results, case: str, name: str) -> list[float]:
        if name in PEERS:
            return self.measure.values(results, case, name)
        about = results["cases"][case]
        if name in AMOUNTS:
            return [AMOUNTS[name](about) / self.measure.unit]
        limit, parts = ("memcpy", about["processes"]) if name == "memcpy_slices" else (name, 1)
        measured = [trial["limits"].get(limit) for trial in trials(results, "machine", case, "")]
        return [run["secs"] / parts for run in measured if run]


def verdict(label: str, against: str, ours: Sequence[float], theirs: Sequence[float], limit: float | None) -> list[str]:
    """A row of `verdicts`: the ratio of the medians, and whether it is at most `limit`; empty without two sides."""
    if not ours or not theirs:
        return []
    aim = NOTHING if limit is None else f"≤ {limit:.3g}"
    least = statistics.median(theirs)
    if least <= 0:  # a difference of times may be, where what is looked for is less than the noise
        return [label, against, NOTHING, aim, "not measurable"]
    ratio = statistics.median(ours) / least
    met = "" if limit is None else "met" if ratio <= limit else "**missed**"
    return [label, against, f"{ratio:.3f}", aim, met]


def verdicts(rows: Iterable[Sequence[str]]) -> list[str]:
    """The table of the rows that are not empty; nothing where all are."""
    found = list(filter(None, rows))
    return table(["median of ours ÷", "that of", "measured", "target", ""], found) if found else []


TARGETS = {
    "gpt2_small": (
        Target("blocking, warm", BLOCKING, "orbax_rp", 1 / 15),
        Target("blocking, warm", BLOCKING, "memcpy", 0.5),
        Target("blocking of the first save", FIRST, "orbax_rp", 1 / 4),
        Target("save to commit, checksums on", COMMIT, "orbax_default", 1 / 6),
        Target("save to commit, checksums on", COMMIT, ("orbax_tuned", "orbax_tuned_single"), 1 / 3),
        Target("save to commit (1.25: 80 % of its speed)", COMMIT, "direct_write", 1 / 0.8),
        Target("CPU-seconds a save", CPU, "orbax_default", 1 / 8),
        Target("CPU-seconds a save", CPU, "gigabytes", 0.45),
        Target("what checksums cost: save to commit", COMMIT, "rpsave_unchecked", 1.2),
        Target("what checksums cost: CPU-seconds a save", CPU, "rpsave_unchecked", 1.2),
        Target("peak memory of a save (R = 8: the owner slices are the state)", PEAK, "state", 1.1),
        Target("restore", RESTORE, "orbax_rp", 1 / 4),
        Target("first restore of a process", FIRST_RESTORE, "orbax_rp", None),
        Target("the same and the first donated step", FIRST_RESTORE_AND_STEP, "orbax_rp", None),
        Target("read to host alone (1.25: 80 % of its speed)", TO_HOST, ("direct_read", "buffered_read_cold"), 1 / 0.8),
        Target("bytes read in a restore", READ, "state", 1.05),
    ),
    "small_leaves": (
        Target("blocking, warm", BLOCKING, "orbax_default", 1 / 50),
        Target("save to commit, checksums on", COMMIT, "orbax_default", 1 / 20),
        Target("first restore of a process", FIRST_RESTORE, "orbax_default", None),
    ),
    "mlp_4_processes": (
        Target("blocking, warm", BLOCKING, "orbax_rp", 1 / 8),
        Target("blocking, warm", BLOCKING, "memcpy_slices", 1.2),
        Target("blocking, warm", BLOCKING, "memcpy_at_once", None),
        Target("blocking of the first save", FIRST, "orbax_rp", 1 / 4),
        Target("save to commit, checksums on", COMMIT, "orbax_rp", 1 / 3),
        Target("first restore of a process", FIRST_RESTORE, "orbax_rp", None),
    ),
    "gpt2_small_2_processes": (
        Target("blocking, warm", BLOCKING, "orbax_rp", 1 / 2),
        Target("blocking, warm", BLOCKING, "memcpy_slices", 1.2),
        Target("blocking, warm", BLOCKING, "memcpy_at_once", None),
        Target("blocking of the first save", FIRST, "orbax_rp", 1 / 4),
        Target("save to commit, checksums on", COMMIT, "orbax_rp", 1 / 2),
        Target("blocking, warm", BLOCKING, "torch_dcp_async", 1),
        Target("save to commit, checksums on", COMMIT, "torch_dcp_async", 1),
        Target("first restore of a process", FIRST_RESTORE, "orbax_rp", None),
        Target("first restore of a process", FIRST_RESTORE, "torch_dcp_async", None),
    ),
}
