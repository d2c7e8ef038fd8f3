"""Makes the tables and plots of docs/performance.md and README.md from results files; no figure is copied by hand.

python -m benchmarks.report benchmarks/results/<file>.json …   rewrites what stands between the markers of both pages
python -m benchmarks.report runs/<file>.json --print            only prints it
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import gpu, loop_costs, modes, planning, plots, program_costs, restore_costs, scaling
from benchmarks.launch import ROOT
from benchmarks.peers import PEERS
from benchmarks.states import CASES
from benchmarks.tables import Measure, Results, spread, table, trials
from benchmarks.targets import Target, verdicts

PAGE = ROOT / "docs" / "performance.md"
IMAGES = ROOT / "docs" / "img"
README = ROOT / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

BLOCKING = Measure("blocking, s", "save", "blocking_secs", digits=3)
COMMIT = Measure("to commit, s", "save", "commit_secs")
FIRST = Measure("first, s", "save", "blocking_secs", first=True)
CPU = Measure("CPU-s", "save", "cpu_secs")
PEAK = Measure("peak over state, GB", "save", "peak_over_state_bytes", unit=1e9)
RESTORE = Measure("restore, s", "restore", "restore_secs")
READ = Measure("read calls, GB", "restore", "called_read_bytes", unit=1e9)
TO_HOST = Measure("read to host alone, s", "restore", "read_secs")

SAVING = (
    BLOCKING,
    FIRST,
    COMMIT,
    CPU,
    PEAK,
    Measure("stored, GB", "save", "stored_bytes", unit=1e9),
    Measure("files", "save", "files", digits=0),
)
RESTORING = (
    RESTORE,
    Measure("first, s", "restore", "restore_secs", first=True),
    Measure("CPU-s", "restore", "cpu_secs"),
    READ,
    Measure("from disk, GB", "restore", "storage_read_bytes", unit=1e9),
    TO_HOST,
    Measure("shared by replicas, GB", "restore", "shared_bytes", unit=1e9),
    Measure("restore + first donated step, s", "restore", "restore_and_step_secs"),
    Measure("peak of the first, GB", "restore", "peak_bytes", first=True, unit=1e9),
)


README_CASE = "gpt2_small"
TARGETS = {
    "gpt2_small": (
        Target("blocking, warm", BLOCKING, "orbax_rp", 1 / 8),
        Target("blocking, warm", BLOCKING, "orbax_rp", 1 / 15),
        Target("blocking, warm", BLOCKING, "memcpy", 0.5),
        Target("blocking of the first save", FIRST, "orbax_rp", 1 / 4),
        Target("save to commit, checksums on", COMMIT, "orbax_default", 1 / 2),
        Target("save to commit, checksums on", COMMIT, "orbax_default", 1 / 6),
        Target("save to commit, checksums on", COMMIT, "orbax_tuned", 1 / 3),
        Target("save to commit (1.25: 80 % of its speed)", COMMIT, "direct_write", 1 / 0.8),
        Target("CPU-seconds a save", CPU, "orbax_rp", 1 / 2),
        Target("CPU-seconds a save", CPU, "orbax_default", 1 / 8),
        Target("CPU-seconds a save", CPU, "gigabytes", 0.45),
        Target("what checksums cost: save to commit", COMMIT, "rpsave_unchecked", 1.2),
        Target("what checksums cost: CPU-seconds a save", CPU, "rpsave_unchecked", 1.2),
        Target("peak memory of a save (R = 8: the owner slices are the state)", PEAK, "state", 1.15),
        Target("peak memory of a save", PEAK, "state", 1.1),
        Target("restore", RESTORE, "orbax_rp", 1 / 3),
        Target("restore", RESTORE, "orbax_rp", 1 / 4),
        Target("read to host alone (1.25: 80 % of its speed)", TO_HOST, "direct_read", 1 / 0.8),
        Target("bytes read in a restore", READ, "state", 1.05),
    ),
    "small_leaves": (
        Target("blocking, warm", BLOCKING, "orbax_default", 1 / 50),
        Target("save to commit, checksums on", COMMIT, "orbax_default", 1 / 20),
    ),
    "mlp_4_processes": (
        Target("blocking, warm", BLOCKING, "orbax_rp", 1 / 8),
        Target("save to commit, checksums on", COMMIT, "orbax_rp", 1 / 3),
    ),
    "gpt2_small_2_processes": (
        Target("blocking, warm", BLOCKING, "orbax_rp", 1 / 2),
        Target("save to commit, checksums on", COMMIT, "orbax_rp", 1 / 2),
        Target("blocking, warm", BLOCKING, "torch_dcp_async", 1),
        Target("save to commit, checksums on", COMMIT, "torch_dcp_async", 1),
    ),
}


def peer_table(results: Results, case: str, measures: Sequence[Measure]) -> list[str]:
    peers = [name for name in PEERS if trials(results, measures[0].kind, case, name)]
    rows = [[PEERS[name].label] + [spread(m.values(results, case, name), m.digits) for m in measures] for name in peers]
    return table(["", *(measure.heading for measure in measures)], rows)


def limits_table(results: Results, case: str) -> list[str]:
    measured = [trial["limits"] for trial in trials(results, "machine", case, "")]
    nbytes = results["cases"][case]["state_bytes"]
    rows = []
    for name in measured[0] if measured else ():
        runs = [limits[name] for limits in measured if limits[name]]
        secs = [run["secs"] for run in runs]
        speed = f"{nbytes / 1e9 / statistics.median(secs):.2f}" if secs else "not possible here"
        rows.append([name.replace("_", " "), spread(secs, 2), speed, spread([run["cpu_secs"] for run in runs], 2)])
    return table(["", "s", "GB/s", "CPU-s"], rows)


def soak_table(results: Results) -> list[str]:
    rows = []
    for trial in (trial for trial in results["trials"] if trial["kind"] == "soak" and not trial["error"]):
        growth = trial["growth_after_third_bytes"] / 1e6
        saves = len(trial["resident_bytes"])
        rows.append([PEERS[trial["peer"]].label, str(saves), f"{trial['state_bytes'] / 1e6:.0f}", f"{growth:+.1f}"])
    return table(["", "saves", "state, MB", "growth after the third, MB"], rows) if rows else []


def failures(results: Results) -> list[str]:
    """What a reader must know before the tables: trials that failed, restores that were not bit-equal."""
    found = [
        f"**{trial['kind']} by {trial['peer']} failed in round {trial['round'] + 1}.**"
        for trial in results["trials"]
        if trial["error"]
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
    if "save" not in CASES[name].kinds:
        return [*lines, *loop_costs.section(results, name), *program_costs.section(results, name)]
    if name in TARGETS:
        lines += [*verdicts(target.row(results, name) for target in TARGETS[name]), ""]
    lines += [f"![Blocking and time to commit of each peer](img/{name}.png)", ""]
    if name == modes.CASE:
        saving = modes.modes_table(results, (PEAK, BLOCKING, COMMIT, CPU), BLOCKING)
    else:
        saving = peer_table(results, name, SAVING)
    tables = [("Saving (warm saves; medians, min–max)", saving)]
    if "restore_variants" in CASES[name].kinds:
        tables += restore_costs.tables(results, name)
    if "restore" in CASES[name].kinds:
        tables.append(
            ("Restoring from cold files (warm process; medians, min–max)", peer_table(results, name, RESTORING))
        )
    tables.append(("Limits of the machine for as many bytes, in the same run", limits_table(results, name)))
    for title, body in tables:
        lines += [f"**{title}**", "", *body, ""]
    return lines


def local_cases(results: Results) -> list[str]:
    """Cases that were saved to the local disk; the others show how saving scales."""
    return [name for name, case in results["cases"].items() if "card_bytes_per_sec" not in case]


def render(results: Results, source: str) -> str:
    """A results file's part of the page."""
    about = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    origin = (
        f"From `{source}`, made by `{about['command']}` on {about['date'][:10]} at commit {about['commit']}: "
        f"{about['cpus']} CPUs, {about['memory_bytes'] / 2**30:.0f} GiB, Linux {about['kernel']}, "
        f"Python {about['python']}, {versions}."
    )
    if "planning" in results:
        return "\n".join([origin, "", *planning.section(results)])
    if "gpu" in results:
        return "\n".join([origin, "", *gpu.section(results)])
    lines = [origin, "", *failures(results), ""]
    for name in local_cases(results):
        lines += case_section(results, name)
    lines += scaling.section(results)
    if soak := soak_table(results):
        lines += ["### Memory over many saves, garbage collector disabled", "", *soak, ""]
    return "\n".join(lines)


def draw(results: Results) -> None:
    """Makes the plots that `render` refers to."""
    for name in local_cases(results):
        if "save" in CASES[name].kinds and not results["cases"][name]["skipped"]:
            plots.peers(results, name, (BLOCKING, COMMIT), IMAGES / f"{name}.png")
        if saves := program_costs.last_saves(results, name):
            plots.memory(saves, IMAGES / program_costs.image(name))
        if spans := loop_costs.spans(results, name):
            plots.timeline(spans, loop_costs.LANES, IMAGES / loop_costs.IMAGE)
    if scaling.points(results):
        plots.scaling(scaling.points(results), scaling.points(results, sharded=True), IMAGES / scaling.IMAGE)


def summary(results: Results) -> list[str]:
    """What a results file has for the README: the most telling measures of one case, the picture of a loop's save."""
    lines = []
    if any(loop_costs.spans(results, name) for name in results["cases"]):
        lines += [f"![One save beside the steps of its loop](docs/img/{loop_costs.IMAGE})", ""]
    if README_CASE not in results["cases"]:
        return lines
    about, case = results["environment"], results["cases"][README_CASE]
    measures = (BLOCKING, COMMIT, CPU, PEAK, RESTORE)
    subject = f"{case['about'][0].upper()}{case['about'][1:]} ({case['state_bytes'] / 1e9:.2f} GB)"
    heading = f"{subject}, {about['cpus']} cores; medians (min–max) of one interleaved run:"
    return [*lines, heading, "", *peer_table(results, README_CASE, measures), ""]


def insert(page: str, body: str) -> str:
    """`page` with `body` between its markers."""
    head, _, rest = page.partition(BEGIN)
    _, marker, tail = rest.partition(END)
    if not marker:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{head}{BEGIN}\n{body}{END}{tail}"


def main(arguments: Sequence[str] | None = None, show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser("benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--print", action="store_true", help="print instead of rewriting the pages and plots")
    options = parser.parse_args(arguments)
    bodies: list[str] = []
    summaries: list[str] = []
    for source in map(Path.resolve, options.results):
        results = json.loads(source.read_text())
        bodies.append(render(results, str(source.relative_to(ROOT) if ROOT in source.parents else source)))
        if not options.print and "cases" in results:
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
