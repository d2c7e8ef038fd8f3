"""The page's part about restores onto other targets and from a warm page cache, and about placing alone."""

import statistics

from benchmarks import restores
from benchmarks.peers import PEERS
from benchmarks.tables import NOTHING, Results, spread, table, trials
from benchmarks.targets import verdict

_ONTO = (restores.SAME, restores.OTHER, restores.ONE)


def verdicts(results: Results, case: str) -> list[list[str]]:
    """Rows of `targets.verdicts`: every way to restore beside Orbax's, and placing beside a copy in memory."""
    peer = "orbax_rp"
    rows = [
        verdict(
            f"restore, {variant}",
            PEERS[peer].label,
            _restore_secs(results, case, "rpsave", variant),
            _restore_secs(results, case, peer, variant),
            1 / 4,
        )
        for variant in restores.VARIANTS
    ]
    for target in _ONTO:
        secs = [run["place_secs"] for run in _placements(results, case, "rpsave", target)]
        rows.append(verdict(f"placing, onto {target}", "a memcpy of the state", secs, _copies(results, case), 1 / 0.8))
    return rows


def tables(results: Results, case: str) -> list[tuple[str, list[str]]]:
    """Titles and tables of a case that has trials of the kind `restore_variants`."""
    measured = [peer for peer in PEERS if trials(results, "restore_variants", case, peer)]
    if not measured:
        return []
    rows = [
        [variant, *(spread(_restore_secs(results, case, peer, variant), 2) for peer in measured)]
        for variant in restores.VARIANTS
    ]
    copies = _copies(results, case)
    gigabytes = results["cases"][case]["state_bytes"] / 1e9
    speeds = [gigabytes / secs for secs in copies]
    placing = [["memcpy of the state", NOTHING, NOTHING, spread(copies, 3), spread(speeds, 2), NOTHING]]
    for peer in measured:
        for target in _ONTO:
            if found := _placements(results, case, peer, target):
                placing.append(
                    [
                        PEERS[peer].label,
                        target,
                        spread([run["read_secs"] for run in found], 2),
                        spread([run["place_secs"] for run in found], 3),
                        spread([run["bytes"] / 1e9 / run["place_secs"] for run in found], 2),
                        f"{statistics.median(run['shared_bytes'] for run in found) / 1e9:.2f}",
                    ]
                )
    headings = ["onto", "read to host, s", "placed, s", "GB/s of the state", "shared by replicas, GB"]
    return [
        ("Restoring, s (warm process; medians, min–max)", table(["", *(PEERS[peer].label for peer in measured)], rows)),
        ("Placing what was read (medians, min–max)", table(["", *headings], placing)),
    ]


def _restore_secs(results: Results, case: str, peer: str, variant: str) -> list[float]:
    runs = _warm(results, case, peer, "restores")
    return [run["restore_secs"] for run in runs if run["variant"] == variant]


def _placements(results: Results, case: str, peer: str, target: str) -> list[dict]:
    return [run for run in _warm(results, case, peer, "placements") if run["target"] == target]


def _warm(results: Results, case: str, peer: str, runs: str) -> list[dict]:
    """The runs of processes that have done the same before."""
    found = trials(results, "restore_variants", case, peer)
    return [run for trial in found for run in trial[runs] if run["turn"]]


def _copies(results: Results, case: str) -> list[float]:
    return [trial["limits"]["memcpy"]["secs"] for trial in trials(results, "machine", case, "")]
