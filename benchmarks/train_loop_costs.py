"""What a save costs a train loop: the page's part about the case `train_loop`."""

import dataclasses
import statistics
from typing import Any

from benchmarks.peers import PEERS
from benchmarks.tables import NOTHING, Results, spread, table, trials
from benchmarks.targets import verdict, verdicts

COST_TARGET = 1 / 4
"""Of what a save of Orbax costs the loop."""
IMAGE = "timeline.png"
LANES = {
    "step": "train steps",
    "call": "the call",
    "rpsave:flatten": "take the state apart",
    "rpsave:dispatch": "snapshot dispatch",
    "rpsave:prepare": "prepare directory",
    "rpsave:snapshot": "wait for the copy",
    "rpsave:write": "write",
    "rpsave:commit": "commit",
}
"""Annotations of a traced save, by their lane in the picture."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the saves of one peer cost the loop; a value a save, but for the steps and the first call.

    Attributes:
        label: the peer's.
        steps: steps of a window.
        window_secs: windows without a save.
        extra_secs: how much longer a window with a save took than the one before it.
        extra_cpu_secs: how much more processor time it took.
        blocking_secs: for which the call blocked.
        first_blocking_secs: for which the first call of a run blocked.
        commit_secs: from the call until the save was committed.
        quiet_steps: seconds of the steps of windows without a save.
        slow_steps: seconds of the steps that began while a save was under way.
    """

    label: str
    steps: int
    window_secs: list[float]
    extra_secs: list[float]
    extra_cpu_secs: list[float]
    blocking_secs: list[float]
    first_blocking_secs: list[float]
    commit_secs: list[float]
    quiet_steps: list[float]
    slow_steps: list[float]

    @property
    def slowdowns(self) -> list[float]:
        """Each step beside a save ÷ the median of the quiet ones."""
        quiet = statistics.median(self.quiet_steps)
        return [secs / quiet for secs in self.slow_steps]

    def row(self) -> list[str]:
        window, quiet = statistics.median(self.window_secs), statistics.median(self.quiet_steps)
        slower = self.slowdowns
        return [
            self.label,
            spread([1e3 * secs for secs in self.extra_secs], 0),
            f"{100 * statistics.median(self.extra_secs) / window:.1f}",
            spread([1e3 * secs for secs in self.blocking_secs], 1),
            spread([1e3 * secs for secs in self.first_blocking_secs], 1),
            spread(self.commit_secs, 2),
            spread(self.extra_cpu_secs, 2),
            f"{1e3 * quiet:.0f} ({max(self.quiet_steps) / quiet:.2f})",
            f"{statistics.median(slower):.3f}" if slower else NOTHING,
            f"{max(slower):.2f}" if slower else NOTHING,
        ]


def costs(results: Results, case: str, peer: str) -> Costs | None:
    """What was measured of a peer; None where nothing was."""
    found = trials(results, "loop", case, peer)
    windows = [window for trial in found for window in trial["windows"]]
    if not windows:
        return None
    quiet, saving = windows[::2], windows[1::2]
    pairs = list(zip(quiet, saving, strict=True))
    return Costs(
        label=PEERS[peer].label,
        steps=len(quiet[0]["step_secs"]),
        window_secs=[window["secs"] for window in quiet],
        extra_secs=[with_save["secs"] - without["secs"] for without, with_save in pairs],
        extra_cpu_secs=[with_save["cpu_secs"] - without["cpu_secs"] for without, with_save in pairs],
        blocking_secs=[window["blocking_secs"] for window in saving],
        first_blocking_secs=[trial["first_blocking_secs"] for trial in found],
        commit_secs=[window["commit_secs"] for window in saving],
        quiet_steps=[secs for window in quiet for secs in window["step_secs"]],
        slow_steps=[secs for window in saving for secs in window["step_secs"][: window["steps_beside_save"]]],
    )


def spans(results: Results, case: str) -> list[dict[str, Any]]:
    """The traced save of ours; empty where there is none."""
    traced = trials(results, "loop", case, "rpsave")
    return traced[-1]["spans"] if traced else []


def section(results: Results, case: str) -> list[str]:
    """The tables of a case whose trials are loops."""
    measured = {peer: found for peer in PEERS if (found := costs(results, case, peer))}
    if not measured:
        return []
    rows, ours = [], measured.get("rpsave")
    if ours is not None:
        for peer in ("orbax_default", "orbax_rp"):
            if peer in measured:
                theirs = measured[peer]
                rows.append(
                    verdict("what a save costs the loop", theirs.label, ours.extra_secs, theirs.extra_secs, COST_TARGET)
                )
        slowed = [found for peer, found in measured.items() if peer != "rpsave" and found.slow_steps]
        for label, summary in (("median", statistics.median), ("worst", max)):
            if slowed and ours.slow_steps:
                least = min(slowed, key=lambda found: summary(found.slowdowns))
                sides = [summary(ours.slowdowns)], [summary(least.slowdowns)]
                rows.append(verdict(f"{label} step beside a save", f"the best of the others: {least.label}", *sides, 1))
    steps = next(iter(measured.values())).steps
    headings = [
        "a save costs, ms",
        f"of {steps} steps, %",
        "blocking, ms",
        "of the run's first save",
        "to commit, s",
        "CPU-s",
        "quiet step, ms (worst ÷ median)",
        "step beside a save ÷ quiet step: median",
        "worst",
    ]
    title = f"**What a save costs the loop (windows of {steps} steps; medians, min–max)**"
    table_ = table(["", *headings], [found.row() for found in measured.values()])
    picture = [f"![One save beside the steps of its loop](img/{IMAGE})", ""] if spans(results, case) else []
    return [*verdicts(rows), "", *picture, title, "", *table_, ""]
