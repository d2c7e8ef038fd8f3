"""How the time of a save falls with the number of hosts: measured, and as a model predicts it."""

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks.tables import Results, spread, table, trials

IMAGE = "scaling.png"
SPEED_UP_TARGET = 0.9
"""Of R: a save of R hosts is to take at most 1 / (0.9 R) of that of one host."""
BALANCE_TARGET = 1.02
"""Most bytes that a host sends ÷ the hosts' mean."""


@dataclasses.dataclass(frozen=True)
class Point:
    """The saves of one number of hosts.

    Attributes:
        hosts: R.
        least_secs: what the hosts' cards need at least for the state.
        single: seconds to commit, one host writing everything; the same saves as `parallel` where R is 1.
        parallel: seconds to commit, every host writing its share.
        blocking: seconds for which the loop was blocked, every host writing its share.
        balance: most bytes that a host sent ÷ the mean, in the least balanced save.
    """

    hosts: int
    least_secs: float
    single: list[float]
    parallel: list[float]
    blocking: list[float]
    balance: float

    @property
    def secs(self) -> float:
        return statistics.median(self.parallel)


def points(results: Results, *, sharded: bool = False) -> list[Point]:
    """By number of hosts; `sharded`: those of states that are sharded over the devices of each host."""
    found = []
    for name, case in results["cases"].items():
        if "card_bytes_per_sec" not in case or (case["devices"] > 1) != sharded:
            continue
        single, parallel = (
            [save for trial in trials(results, "throttled_save", name, peer) for save in trial["throttled_saves"][1:]]
            for peer in ("rpsave_single", "rpsave")
        )
        if not parallel:
            continue
        hosts, sent = case["processes"], [save["sent_bytes"] for save in parallel]
        found.append(
            Point(
                hosts=hosts,
                least_secs=case["state_bytes"] / hosts / case["card_bytes_per_sec"],
                single=[save["commit_secs"] for save in (parallel if hosts == 1 else single)],
                parallel=[save["commit_secs"] for save in parallel],
                blocking=[save["blocking_secs"] for save in parallel],
                balance=max(max(by_host) / statistics.mean(by_host) for by_host in sent),
            )
        )
    return sorted(found, key=lambda point: point.hosts)


def fixed_secs(measured: Sequence[Point]) -> float:
    """The a of the model, time = a + bytes / (R · bandwidth), by least squares; the bandwidth is the card's."""
    return statistics.mean(point.secs - point.least_secs for point in measured)


def speed_up(measured: Sequence[Point], point: Point) -> float | None:
    """How many times faster than one host; None where one host was not measured."""
    one = [first.secs for first in measured if first.hosts == 1]
    return one[0] / point.secs if one else None


def scaling_table(measured: Sequence[Point]) -> list[str]:
    fixed, rows = fixed_secs(measured), []
    for point in measured:
        faster, model = speed_up(measured, point), point.least_secs + fixed
        efficiency = None if faster is None else faster / point.hosts
        met = efficiency is not None and efficiency >= SPEED_UP_TARGET and point.balance <= BALANCE_TARGET
        rows.append(
            [
                str(point.hosts),
                spread(point.single, 2),
                spread(point.parallel, 2),
                f"{point.least_secs:.2f}",
                f"{model:.2f}",
                f"{point.secs / model:.3f}",
                spread(point.blocking, 3),
                "–" if faster is None else f"{faster:.2f}",
                "–" if efficiency is None else f"{efficiency:.3f}",
                f"{point.balance:.4f}",
                "met" if met else "**missed**",
            ]
        )
    return table(
        [
            "hosts (R)",
            "single-replica, s",
            "replica-parallel, s",
            "cards alone, s",
            "model, s",
            "measured ÷ model",
            "blocking, s",
            "speed-up",
            "÷ R",
            "largest ÷ mean bytes sent",
            f"≥ {SPEED_UP_TARGET} and ≤ {BALANCE_TARGET}",
        ],
        rows,
    )


def section(results: Results) -> list[str]:
    """The page's part about scaling; empty where it was not measured."""
    replicated, sharded = points(results), points(results, sharded=True)
    if not replicated:
        return []
    case = next(case for case in results["cases"].values() if "card_bytes_per_sec" in case)
    size, rate = f"{case['state_bytes'] / 1e6:.0f} MB", f"{case['card_bytes_per_sec'] / 1e6:g} MB/s"
    lines = [
        f"### `hosts_R`: {size} saved by R hosts with a network card of {rate} each",
        "",
        f"![Time to commit against the number of hosts](img/{IMAGE})",
        "",
    ]
    for title, measured in (
        ("Replicated: save to commit (medians, min–max)", replicated),
        ("Sharded over the 2 devices of each host, replicated over the hosts", sharded),
    ):
        if measured:
            fixed = f"The model's fixed cost a is {fixed_secs(measured):.2f} s."
            lines += [f"**{title}**", "", *scaling_table(measured), "", fixed, ""]
    return lines
