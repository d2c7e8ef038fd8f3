"""Whether memory stays flat over many saves: the page's part about the memory test."""

import statistics
from collections.abc import Sequence

from benchmarks.peers import PEERS
from benchmarks.tables import Results, table
from benchmarks.targets import verdict, verdicts

FLAT_SAVES = 100
"""Of a test that says whether memory stays flat."""
FLAT_TARGET = 0.01
"""Of the state's bytes: the most that the later half of the saves may add, all together."""


def later_growth(resident_bytes: Sequence[int]) -> float:
    """Bytes that the later half of the saves added: along the straight line that fits that half best.

    The former half is for what grows once: compiled programs, malloc's arenas. A line is less at the mercy of single
    samples than a difference of two.
    """
    later = resident_bytes[len(resident_bytes) // 2 :]
    slope, _ = statistics.linear_regression(range(len(later)), later)
    return slope * len(later)


def section(results: Results) -> list[str]:
    """The verdict and the table; empty where no memory was watched."""
    soaks = [
        (peer, trial)
        for peer in PEERS
        for trial in results["trials"]
        if (trial["kind"], trial["peer"], trial["error"]) == ("soak", peer, None)
    ]
    if not soaks:
        return []
    rows, targets = [], []
    for peer, trial in soaks:
        resident, later = trial["resident_bytes"], later_growth(trial["resident_bytes"])
        if peer == "rpsave" and len(resident) >= FLAT_SAVES:
            label = f"growth over the later half of {len(resident)} saves"
            targets.append(verdict(label, "the state's bytes", [later], [trial["state_bytes"]], FLAT_TARGET))
        growth = (f"{each / 1e6:+.1f}" for each in (trial["growth_after_third_bytes"], later))
        rows.append([PEERS[peer].label, str(len(resident)), f"{trial['state_bytes'] / 1e6:.0f}", *growth])
    headings = ["saves", "state, MB", "growth after the third, MB", "growth over the later half, MB"]
    lines = ["### Memory over many saves, garbage collector disabled", ""]
    if judged := verdicts(targets):
        lines += [*judged, ""]
    return [*lines, *table(["", *headings], rows), ""]
