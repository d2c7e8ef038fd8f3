"""The plots of docs/performance.md. Figures are made without pyplot, which keeps state and looks for a screen."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.peers import PEERS
from benchmarks.scaling import CONTINUED_HOSTS, Point, fit
from benchmarks.tables import Measure, Results, trials

_OURS, _THEIRS, _QUIET = "#1f77b4", "#9aa5b1", "#555555"


def peers(results: Results, case: str, measures: Sequence[Measure], path: Path) -> None:
    """A bar a peer for each measure: median, with a line from the least to the most."""
    names = [name for name in PEERS if trials(results, "save", case, name)]
    figure = Figure(figsize=(9, 1.2 + 0.35 * len(names)), layout="constrained")
    for axes, measure in zip(figure.subplots(1, len(measures), sharey=True, squeeze=False)[0], measures, strict=True):
        for row, name in enumerate(names):
            values = measure.values(results, case, name)
            if not values:
                continue
            middle, color = statistics.median(values), _OURS if name.startswith("rpsave") else _THEIRS
            reach = [[middle - min(values)], [max(values) - middle]]
            axes.barh(row, middle, xerr=reach, color=color, ecolor=_QUIET, capsize=2)
            axes.annotate(f" {middle:.{measure.digits}f}", (max(values), row), va="center", fontsize=8)
        axes.set_yticks(range(len(names)), [PEERS[name].label for name in names])
        axes.margins(x=0.15)
        axes.set_xlabel(measure.heading)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    _write(figure, path)


def scaling(replicated: Sequence[Point], sharded: Sequence[Point], path: Path) -> None:
    """Time to commit, measured and modelled, and blocked time, against hosts."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    commit, blocking = figure.subplots(1, 2, width_ratios=[3, 2])
    single = [point for point in replicated if point.single]
    singles = [statistics.median(point.single) for point in single]
    commit.plot([point.hosts for point in single], singles, "s", color=_THEIRS, label="one replica writes")
    for points, marker, color, label in (
        (replicated, "o", _OURS, "each replica writes its share"),
        (sharded, "x", "black", "the same, sharded over 2 devices a host"),
    ):
        if points:
            hosts = [point.hosts for point in points]
            commit.plot(hosts, [point.secs for point in points], marker, color=color, label=label)
            _blocked(blocking, points, marker, color, label)
    measured = [point.hosts for point in replicated]
    shown = measured
    if model := fit(replicated):
        powers = [2**i for i in range(CONTINUED_HOSTS.bit_length())]
        beyond = [max(measured), *(hosts for hosts in powers if hosts > max(measured))]
        label = f"model: {model.fixed_secs:.2f} s + bytes / (R · {model.bandwidth / 1e6:.2f} MB/s)"
        for hosts, line, name in ((measured, "-", label), (beyond, "--", "continued, not measured")):
            commit.plot(hosts, [model.secs(number) for number in hosts], line, color=_OURS, lw=1, label=name)
        commit.axhline(
            model.fixed_secs, color=_QUIET, lw=0.8, ls=":", label=f"its fixed cost, {model.fixed_secs:.2f} s"
        )
        shown = powers
    commit.set_xscale("log", base=2)
    commit.set_yscale("log", base=2)
    commit.yaxis.set_major_formatter("{x:g}")
    commit.set_xticks(shown, [f"{hosts:,}" for hosts in shown], fontsize=8)
    commit.set_ylabel("save to commit, s")
    blocking.set_xticks(measured, [str(hosts) for hosts in measured])
    blocking.set_ylim(bottom=0)
    blocking.set_ylabel("loop blocked, s (median, min–max)")
    for axes in (commit, blocking):
        axes.set_xlabel("hosts (R)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    _write(figure, path)


def _blocked(axes: Axes, points: Sequence[Point], marker: str, color: str, label: str) -> None:
    """Median, with a line from the least to the most, of how long the loop was blocked."""
    middles = [statistics.median(point.blocking) for point in points]
    reach = [
        [middle - min(point.blocking) for middle, point in zip(middles, points, strict=True)],
        [max(point.blocking) - middle for middle, point in zip(middles, points, strict=True)],
    ]
    hosts = [point.hosts for point in points]
    axes.errorbar(hosts, middles, reach, fmt=marker, color=color, elinewidth=1, capsize=3, label=label)


def memory(saves: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Memory over the state's against the time since the call, a line a peer, its commit marked."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for name, save in saves.items():
        secs, gigabytes = ([value / 1e3 for value in save[key]] for key in ("at_ms", "over_state_mb"))
        (line,) = axes.plot(secs, gigabytes, label=PEERS[name].label, lw=2 if name == "rpsave" else 1)
        at_commit = [gb for at, gb in zip(secs, gigabytes, strict=True) if at <= save["commit_secs"]]
        axes.plot(save["commit_secs"], at_commit[-1], "o", color=line.get_color(), ms=5)
    axes.axvline(0, color=_QUIET, lw=0.8, ls=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("s since the save was called; the dot is its commit")
    axes.set_ylabel("resident memory over the state, GB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    _write(figure, path)


def timeline(spans: Sequence[Mapping[str, Any]], lanes: Mapping[str, str], path: Path) -> None:
    """One save beside the steps of its loop.

    Args:
        spans: `name`, `from_secs` and `to_secs`, since the call.
        lanes: Name -> label, from the top: the steps, then the stages. The picture begins with the last step before the
            call and ends with the one in which the save does.
    """
    figure = Figure(figsize=(9, 0.8 + 0.4 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for row, name in enumerate(lanes):
        bars = [(span["from_secs"], span["to_secs"] - span["from_secs"]) for span in spans if span["name"] == name]
        style = {"facecolor": _OURS} if row else {"facecolor": _THEIRS, "edgecolor": "white"}
        axes.broken_barh(bars, (row - 0.35, 0.7), **style)
        if row and bars:  # what is over in a millisecond would not be seen
            secs = sum(length for _, length in bars)
            axes.annotate(f" {1e3 * secs:.3g} ms", (max(sum(bar) for bar in bars), row), va="center", fontsize=8)
    steps, *stages = lanes
    ends = max(span["to_secs"] for span in spans if span["name"] in stages)
    before = [span["from_secs"] for span in spans if span["name"] == steps and span["to_secs"] <= 0]
    behind = [span["to_secs"] for span in spans if span["name"] == steps and span["to_secs"] >= ends]
    axes.set_xlim(max(before, default=-0.25 * ends), 1.02 * min(behind, default=1.35 * ends))
    axes.axvline(0, color=_QUIET, lw=0.8, ls=":")
    axes.set_yticks(range(len(lanes)), list(lanes.values()))
    axes.invert_yaxis()
    axes.set_xlabel("s since the call")
    axes.spines[["top", "right"]].set_visible(False)
    _write(figure, path)


def _write(figure: Figure, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})  # the same figures make the same file
