"""The page's part about restores onto other targets and from a warm page cache, and about placing alone."""

import statistics

from benchmarks import restores
from benchmarks.peers import PEERS
from benchmarks.tables import NOTHING, Results, spread, table, trials


def tables(results: Results, case: str) -> list[tuple[str, list[str]]]:
    """Titles and tables of a case that has trials of the kind `restore_variants`."""
    measured = {peer: found for peer in PEERS if (found := trials(results, "restore_variants", case, peer))}

    if not measured:
        return []

    def warm(peer: str, runs: str) -> list[dict]:
        """The runs of a process that has done the same before."""
        return [run for trial in measured[peer] for run in trial[runs] if run["turn"]]

    rows = [
        [variant, *(spread([r["restore_secs"] for r in warm(peer, "restores") if r["variant"] == variant], 2)
                    for peer in measured)]
        for variant in restores.VARIANTS
    ]  # fmt: skip
    copies = [trial["limits"]["memcpy"]["secs"] for trial in trials(results, "machine", case, "")]
    gigabytes = results["cases"][case]["state_bytes"] / 1e9
    placing = [
        [
            "memcpy of the state",
            NOTHING,
            NOTHING,
            spread(copies, 3),
            spread([gigabytes / secs for secs in copies], 2),
            NOTHING,
        ]
    ]
    for peer in measured:
        for target in (restores.SAME, restores.OTHER, restores.ONE):
            if found := [run for run in warm(peer, "placements") if run["target"] == target]:
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
