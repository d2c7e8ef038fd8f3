"""How the time of a save falls with the number of hosts: measured, and as a model predicts it."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.tables import NOTHING, Results, load, spread, trials, without_blanks

IMAGE = "scaling.png"
SPEED_UP_TARGET = 0.9
"""Of R: a save of R hosts is to take at most 1 / (0.9 R) of that of one host."""
BALANCE_TARGET = 1.02
"""Most bytes that a host sends ÷ the hosts' mean."""
FITTED_HOSTS = 3
"""The model is made from saves of up to so many hosts, and checked on those of more."""
CONTINUED_HOSTS = 4096
"""The most hosts that the picture shows the model for."""


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
        sent_bytes: that all hosts sent together in a save, the median.
    """

    hosts: int
    least_secs: float
    single: list[float]
    parallel: list[float]
    blocking: list[float]
    balance: float
    sent_bytes: float

    @property
    def secs(self) -> float:
        return statistics.median(self.parallel)


@dataclasses.dataclass(frozen=True)
class Model:
    """Seconds to commit = a + bytes / (R · bandwidth).

    Attributes:
        fixed_secs: a, what a save takes whatever the number of hosts.
        sent_bytes: of a save.
        bandwidth: of a host, in bytes/s.
    """

    fixed_secs: float
    sent_bytes: float
    bandwidth: float

    def secs(self, hosts: int) -> float:
        return self.fixed_secs + self.sent_bytes / (hosts * self.bandwidth)


def points(results: Results, *, sharded: bool = False) -> list[Point]:
    """By number of hosts; `sharded`: those of states that are sharded over the devices of each host."""
    found = []
    for name, case in _cases(results).items():
        if (case["devices"] > 1) != sharded:
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
                sent_bytes=statistics.median(sum(by_host) for by_host in sent),
            )
        )
    return sorted(found, key=lambda point: point.hosts)


def fit(measured: Sequence[Point]) -> Model | None:
    """The model that a few hosts give; None where one host, or 2 to `FITTED_HOSTS`, were not measured.

    The bandwidth is what one host sent in a second of its save, less a, so that the model hits that save. Then what a
    save of R hosts takes beyond 1/R of that one's time is a · (1 - 1/R), and a is what fits these best (least squares).
    """
    one = next((point for point in measured if point.hosts == 1), None)
    few = list(filter(_is_fitted, measured))
    if one is None or not few:
        return None
    shares = [1 - 1 / point.hosts for point in few]
    beyond = [point.secs - one.secs / point.hosts for point in few]
    fixed_secs = sum(s * b for s, b in zip(shares, beyond, strict=True)) / sum(share**2 for share in shares)
    return Model(fixed_secs, one.sent_bytes, one.sent_bytes / (one.secs - fixed_secs))


def _is_fitted(point: Point) -> bool:
    """Whether the fixed cost is fitted on it."""
    return 1 < point.hosts <= FITTED_HOSTS


def speed_up(measured: Sequence[Point], point: Point) -> float | None:
    """How many times faster than one host; None where one host was not measured."""
    one = [first.secs for first in measured if first.hosts == 1]
    return one[0] / point.secs if one else None


def scaling_table(measured: Sequence[Point]) -> list[str]:
    model, rows = fit(measured), []
    for point in measured:
        faster, modelled = speed_up(measured, point), model.secs(point.hosts) if model else None
        efficiency = None if faster is None else faster / point.hosts
        met = efficiency is not None and efficiency >= SPEED_UP_TARGET and point.balance <= BALANCE_TARGET
        rows.append(
            [
                str(point.hosts),
                spread(point.single, 2),
                spread(point.parallel, 2),
                f"{point.least_secs:.2f}",
                NOTHING if modelled is None else f"{modelled:.2f}",
                NOTHING if modelled is None else f"{point.secs / modelled:.3f}",
                NOTHING if modelled is None else _role(point),
                spread(point.blocking, 3),
                NOTHING if faster is None else f"{faster:.2f}",
                NOTHING if efficiency is None else f"{efficiency:.3f}",
                f"{point.balance:.4f}",
                "met" if met else "**missed**",
            ]
        )
    return without_blanks(
        [
            "hosts (R)",
            "single-replica, s",
            "replica-parallel, s",
            "cards alone, s",
            "model, s",
            "measured ÷ model",
            "the model there",
            "blocking, s",
            "speed-up",
            "÷ R",
            "largest ÷ mean bytes sent",
            f"≥ {SPEED_UP_TARGET} and ≤ {BALANCE_TARGET}",
        ],
        rows,
    )


def _role(point: Point) -> str:
    """What a number of hosts is for the model."""
    if point.hosts == 1:
        return "gives the bandwidth"
    return "a is fitted" if _is_fitted(point) else "is checked"


def model_line(model: Model, measured: Sequence[Point], card_bytes_per_sec: float) -> str:
    """The model of what was measured in words, and what it says of the most hosts."""
    most = f"{model.secs(CONTINUED_HOSTS):.2f} s for {CONTINUED_HOSTS:,}"
    few = " and ".join(str(point.hosts) for point in filter(_is_fitted, measured))
    return (
        f"The model is {model.fixed_secs:.2f} s + {model.sent_bytes / 1e6:.1f} MB / (R · "
        f"{model.bandwidth / 1e6:.3f} MB/s). The bandwidth is what one host sent a second, less the fixed cost (the "
        f"card lets {card_bytes_per_sec / 1e6:g} MB/s through); that is fitted on {few} hosts, and "
        f"more hosts only check the model. Continued, it gives {model.secs(64):.2f} s for 64 hosts and {most}, if "
        "the fixed cost stays what it is, which nobody has measured with so many."
    )


def _cases(results: Results) -> dict[str, dict[str, Any]]:
    """The cases whose hosts had cards."""
    return {name: case for name, case in results.get("cases", {}).items() if "card_bytes_per_sec" in case}


def subject(results: Results) -> str:
    """What the cases have in common, in words."""
    case, *_ = _cases(results).values()
    size, rate = f"{case['state_bytes'] / 1e6:.0f} MB", f"{case['card_bytes_per_sec'] / 1e6:g} MB/s"
    return f"{size} saved by R hosts with a network card of {rate} each"


def section(results: Results) -> list[str]:
    """The page's part about scaling; empty where it was not measured."""
    replicated, sharded = points(results), points(results, sharded=True)
    if not replicated:
        return []
    card, *_ = (case["card_bytes_per_sec"] for case in _cases(results).values())
    lines = [
        f"### `hosts_R`: {subject(results)}",
        "",
        *load(results, _cases(results)),
        f"![Time to commit and blocked time against the number of hosts](img/{IMAGE})",
        "",
    ]
    for title, measured in (
        ("Replicated: save to commit (medians, min–max)", replicated),
        ("Sharded over the 2 devices of each host, replicated over the hosts", sharded),
    ):
        if measured:
            lines += [f"**{title}**", "", *scaling_table(measured), ""]
            if model := fit(measured):
                lines += [model_line(model, measured, card), ""]
    return lines
