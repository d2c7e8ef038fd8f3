"""Makes the tables and plots of docs/performance.md and README.md from results files; no figure is copied by hand.

python -m benchmarks.report                            rewrites what stands between the markers of both pages
python -m benchmarks.report runs/<file>.json --print   only prints what a file would become
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import (
    alongside_costs,
    compression,
    gpu,
    memory_growth,
    modes,
    planning,
    plots,
    restore_costs,
    scaling,
    train_loop_costs,
)
from benchmarks.launch import ROOT
from benchmarks.measures import BLOCKING, COMMIT, CPU, PEAK, RESTORE, RESTORE_AND_STEP, RESTORING, SAVING
from benchmarks.peers import PEERS
from benchmarks.states import CASES
from benchmarks.tables import Measure, Results, engines_of, load, spread, trials, without_blanks
from benchmarks.targets import TARGETS, verdicts

PAGE = ROOT / "docs" / "performance.md"
IMAGES = ROOT / "docs" / "img"
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

README_CASE = "gpt2_small"


def peer_table(results: Results, case: str, measures: Sequence[Measure], *, engines: bool = False) -> list[str]:
    """A row a peer; empty where none was measured."""
    peers = [name for name in PEERS if trials(results, measures[0].kind, case, name)]
    rows = [[PEERS[name].label] + [spread(m.values(results, case, name), m.digits) for m in measures] for name in peers]
    headings = ["", *(measure.heading for measure in measures)]
    if engines:
        headings.append("engine")
        rows = [[*row, engines_of(results, case, name)] for row, name in zip(rows, peers, strict=True)]
    return without_blanks(headings, rows)


def limits_table(results: Results, case: str) -> list[str]:
    measured = [trial["limits"] for trial in trials(results, "machine", case, "")]
    nbytes = results["cases"][case]["state_bytes"]
    rows = []
    for name in measured[0] if measured else ():
        runs = [limits[name] for limits in measured if limits.get(name)]
        secs = [run["secs"] for run in runs]
        speed = f"{nbytes / 1e9 / statistics.median(secs):.2f}" if secs else "not possible here"
        rows.append([name.replace("_", " "), spread(secs, 2), speed, spread([run["cpu_secs"] for run in runs], 2)])
    return without_blanks(["", "s", "GB/s", "CPU-s"], rows)


def failures(results: Results) -> list[str]:
    """What a reader must know before the tables: trials that failed, restores that were not bit-equal."""
    found = [
        f"**{trial['kind']} by {trial['peer']} failed in round {trial['round'] + 1}: {reason}**"
        for trial in results["trials"]
        if trial["error"]
        for reason in [trial["error"].splitlines()[0].rstrip(": ")]
    ]
    for case in results["cases"].values():
        found += [f"**{PEERS[peer].label} was left out: {reason}**" for peer, reason in case.get("absent", {}).items()]
    restores = [run for trial in results["trials"] for run in trial.get("restores", [])]
    if restores:
        equal = sum(run["bit_equal"] for run in restores)
        found.append(f"{equal} of {len(restores)} restores were bit-equal on every replica.")
    return found


def case_section(results: Results, name: str) -> list[str]:
    case = results["cases"][name]
    size = f"{case['state_bytes'] / 1e9:.3f} GB" + ("" if case["scale"] == 1 else f", scale {case['scale']:g}")
    lines = [f"### `{name}`: {case['about']} ({size})", ""]
    if case["skipped"]:
        return [*lines, f"Not measured: {case['skipped']}.", ""]
    lines += load(results, [name])
    lines += [*train_loop_costs.section(results, name), *alongside_costs.section(results, name)]
    rows = [target.row(results, name) for target in TARGETS.get(name, ())]
    if name == modes.CASE:
        rows += modes.budget_rows(results)
    rows += restore_costs.verdicts(results, name)
    if judged := verdicts(rows):
        lines += [*judged, ""]
    if saved(results, name):
        lines += [f"![Blocking and time to commit of each peer](img/{name}.png)", ""]
    saving = modes.modes_table(results) if name == modes.CASE else peer_table(results, name, SAVING, engines=True)
    for title, body in (
        ("Saving (warm saves; medians, min–max)", saving),
        *restore_costs.tables(results, name),
        ("Restoring from cold files (warm process; medians, min–max)", peer_table(results, name, RESTORING)),
        ("Limits of the machine for as many bytes, in the same run", limits_table(results, name)),
    ):
        if body:
            lines += [f"**{title}**", "", *body, ""]
    return lines


def local_cases(results: Results) -> list[str]:
    """Cases that were saved to the local disk; the others show how saving scales."""
    return [name for name, case in results.get("cases", {}).items() if "card_bytes_per_sec" not in case]


def saved(results: Results, case: str) -> bool:
    """Whether there are saves to draw."""
    return any(BLOCKING.values(results, case, peer) for peer in PEERS)


def origin(results: Results, source: str) -> str:
    """Where figures are from."""
    about = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    return (
        f"From `{source}`, made by `{about['command']}` on {about['date'][:10]} at commit {about['commit']}: "
        f"{about['cpus']} CPUs, {about['memory_bytes'] / 2**30:.0f} GiB, Linux {about['kernel']}, "
        f"Python {about['python']}, {versions}."
    )


def render(results: Results, source: str) -> str:
    """A results file's part of the page."""
    lines = [origin(results, source), ""]
    for key, part in (("planning", planning), ("compression", compression), ("gpu", gpu)):
        if key in results:
            lines += part.section(results)
    if "trials" in results:
        for found in failures(results):
            lines += [found, ""]
        for name in local_cases(results):
            lines += case_section(results, name)
        lines += [*scaling.section(results), *memory_growth.section(results)]
    return "\n".join(lines)


def draw(results: Results) -> None:
    """Makes the plots that `render` refers to."""
    for name in local_cases(results):
        if saved(results, name):
            plots.peers(results, name, (BLOCKING, COMMIT), IMAGES / f"{name}.png")
        if saves := alongside_costs.last_saves(results, name):
            plots.memory(saves, IMAGES / alongside_costs.image(name))
        if spans := train_loop_costs.spans(results, name):
            plots.timeline(spans, train_loop_costs.LANES, IMAGES / train_loop_costs.IMAGE)
    if scaling.points(results):
        plots.scaling(scaling.points(results), scaling.points(results, sharded=True), IMAGES / scaling.IMAGE)


def summary(results: Results) -> list[str]:
    """What a results file has for the README: the most telling measures of one case, and pictures."""
    lines = []
    if any(train_loop_costs.spans(results, name) for name in local_cases(results)):
        lines += [
            "One save beside the steps of its loop:",
            "",
            _picture("A save, by stage", train_loop_costs.IMAGE),
            "",
        ]
    for name in local_cases(results):
        if alongside_costs.last_saves(results, name):
            lines += ["Memory while a save is under way:", ""]
            lines += [_picture("Memory over the state's, of each peer", alongside_costs.image(name)), ""]
    if README_CASE in local_cases(results):
        case, cores = results["cases"][README_CASE], results["environment"]["cpus"]
        measures = (BLOCKING, COMMIT, CPU, PEAK, RESTORE, RESTORE_AND_STEP)
        subject = f"{case['about'][0].upper()}{case['about'][1:]} ({case['state_bytes'] / 1e9:.2f} GB)"
        lines += [f"{subject}, {cores} cores; medians (min–max) of one interleaved run:", ""]
        if saved(results, README_CASE):
            lines += [_picture("Blocking and time to commit of each peer", f"{README_CASE}.png"), ""]
        lines += [*peer_table(results, README_CASE, measures), ""]
    if measured := scaling.points(results):
        most, model = max(point.hosts for point in measured), scaling.fit(measured)
        shown = (
            "time to commit, with its model continued, and blocked time" if model else "time to commit and blocked time"
        )
        lines += [f"{scaling.subject(results)}, measured with up to {most} hosts ({shown}):", ""]
        lines += [_picture("Time to commit and blocked time against the number of hosts", scaling.IMAGE), ""]
    return lines


def _picture(what: str, name: str) -> str:
    return f"![{what}](docs/img/{name})"


def published() -> list[Path]:
    """The results files of the pages: in the order of their cases, then what has none."""

    places = {name: place for place, name in enumerate(CASES)}

    def place(path: Path) -> tuple[int, str]:
        cases = json.loads(path.read_text()).get("cases", {})
        return min((places.get(name, len(places)) for name in cases), default=len(places)), path.name

    return sorted(RESULTS.glob("*.json"), key=place)


def insert(page: str, body: str) -> str:
    """`page` with `body` between its markers."""
    head, _, rest = page.partition(BEGIN)
    _, marker, tail = rest.partition(END)
    if not marker:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{head}{BEGIN}\n{body}{END}{tail}"


def main(arguments: Sequence[str] | None = None, show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser("benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="*", help="default: all of benchmarks/results, in their order")
    parser.add_argument("--print", action="store_true", help="print instead of rewriting the pages and plots")
    options = parser.parse_args(arguments)
    bodies: list[str] = []
    summaries: list[str] = []
    for source in map(Path.resolve, options.results or published()):
        results = json.loads(source.read_text())
        bodies.append(render(results, str(source.relative_to(ROOT) if ROOT in source.parents else source)))
        if not options.print:
            draw(results)
            summaries += summary(results)
    if options.print:
        show("\n".join(bodies))
        return
    PAGE.write_text(insert(PAGE.read_text(), "\n".join(bodies)))
    if summaries:
        README.write_text(insert(README.read_text(), "\n".join(summaries)))


if __name__ == "__main__":
    main()
