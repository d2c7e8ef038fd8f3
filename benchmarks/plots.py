"""The plots of docs/performance.md. Figures are made without pyplot, which keeps state and looks for a screen."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.peers import PEERS
from benchmarks.scaling import Point, fixed_secs
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
    """Time to commit against hosts, measured and modelled, both axes logarithmic."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    hosts = [point.hosts for point in replicated]
    single = [point for point in replicated if point.single]
    fixed = fixed_secs(replicated)
    axes.plot(
        [point.hosts for point in single],
        [statistics.median(point.single) for point in single],
        "s",
        color=_THEIRS,
        label="one replica writes",
    )
    axes.plot(hosts, [point.secs for point in replicated], "o", color=_OURS, label="each replica writes its share")
    if sharded:
        secs = [point.secs for point in sharded]
        axes.plot([p.hosts for p in sharded], secs, "x", color="black", label="the same, sharded over 2 devices a host")
    model = [point.least_secs + fixed for point in replicated]
    axes.plot(hosts, model, "-", color=_OURS, lw=1, label=f"model: {fixed:.2f} s + bytes / (R · bandwidth)")
    axes.plot(hosts, [p.least_secs for p in replicated], ":", color=_QUIET, lw=1, label="bytes / (R · bandwidth)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(hosts, [str(number) for number in hosts])
    axes.set_xlabel("hosts (R)")
    axes.set_ylabel("save to commit, s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    _write(figure, path)


def _write(figure: Figure, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})  # the same figures make the same file
