"""The page's part about what a save does to the program beside it: memory over time, pauses of its Python code."""

import operator
import statistics
from typing import Any

from benchmarks.peers import PEERS
from benchmarks.tables import Results, spread, table, trials
from benchmarks.targets import verdict, verdicts

_SHORTEST_SECS = 1e-3
"""Of a spin that says something: a peer that is done when its call returns leaves nothing to spin beside."""


def last_saves(results: Results, case: str) -> dict[str, dict[str, Any]]:
    """Peer -> its last save whose memory was watched: a warm one."""
    return {peer: found[-1]["watched"][-1] for peer in PEERS if (found := trials(results, "alongside", case, peer))}


def _spins(results: Results, case: str, peer: str) -> list[dict[str, float]]:
    found = trials(results, "alongside", case, peer)
    return [spin for trial in found for spin in trial["spun"] if spin["secs"] > _SHORTEST_SECS]


def _row(results: Results, case: str, peer: str) -> list[str]:
    warm = [save for trial in trials(results, "alongside", case, peer) for save in trial["watched"][1:]]
    spins = _spins(results, case, peer)
    gigabytes = results["cases"][case]["state_bytes"] / 1e9
    return [
        PEERS[peer].label,
        spread([1e3 * spin["worst_secs"] for spin in spins], 1),
        spread([1e3 * spin["quiet_worst_secs"] for spin in spins], 1),
        spread([1e3 * lock_secs(spin) for spin in spins], 0),
        spread([spin["secs"] for spin in spins], 2),
        spread([1e3 * save["blocking_secs"] for save in warm], 0),
        spread([save["cpu_secs"] / gigabytes for save in warm], 2),
        spread([max(save["over_state_mb"]) / 1e3 for save in warm], 2),
        spread([statistics.mean(_beside(save)) / 1e3 for save in warm], 2),
    ]


def lock_secs(spin: dict[str, float]) -> float:
    """What a save took from the main thread: the most that its threads held the interpreter's lock."""
    return spin["lost_secs"] - spin["quiet_lost_secs"] * spin["secs"] / spin["quiet_secs"]


def _beside(save: dict[str, Any]) -> list[int]:
    """The samples between the call and the commit, or all where it was too short for one."""
    end = 1e3 * save["commit_secs"]
    return [mb for at, mb in zip(save["at_ms"], save["over_state_mb"], strict=True) if 0 <= at <= end] or save[
        "over_state_mb"
    ]


def _verdicts(results: Results, case: str) -> list[str]:
    """Ours against the best of the others; no more is asked than to be no worse."""
    spins = {peer: found for peer in PEERS if (found := _spins(results, case, peer))}
    rows = []
    for label, figure in (
        ("worst pause beside a save", operator.itemgetter("worst_secs")),
        ("lock held at most, a save", lock_secs),
    ):
        values = {peer: [figure(spin) for spin in found] for peer, found in spins.items()}
        ours = values.pop("rpsave", [])
        if ours and values:
            least = min(values, key=lambda peer: statistics.median(values[peer]))
            rows.append(verdict(label, f"the best of the others: {PEERS[least].label}", ours, values[least], 1))
    return verdicts(rows)


def image(case: str) -> str:
    """The name of the case's picture."""
    return f"{case}_memory.png"


def section(results: Results, case: str) -> list[str]:
    """The table and the picture of a case whose trials are of the kind `alongside`."""
    peers = last_saves(results, case)
    if not peers:
        return []
    headings = [
        "worst pause beside a save, ms",
        "worst without one, ms",
        "lock held at most, ms a save",
        "a save beside a spinning thread, s",
        "blocking, ms",
        "CPU-s a GB",
        "peak over state, GB",
        "mean during the save, GB",
    ]
    judged = _verdicts(results, case)
    return [
        *([*judged, ""] if judged else []),
        f"![Memory over the state's while a save is under way](img/{image(case)})",
        "",
        "**What a save does to the program beside it (medians, min–max)**",
        "",
        *table(["", *headings], [_row(results, case, peer) for peer in peers]),
        "",
    ]
