"""Which committed steps to delete. Pure: no storage, no clock.

Orbax's preservation policies are not used: `BestN` sorts by whatever the metric function returns, so that one NaN
scrambles the order, and it keeps every step while there are no more than n, those with NaN too, even if their metrics
are taken away first. And importing the policies imports JAX.
"""

import math
import numbers
from collections.abc import Mapping
from typing import Any

from flax_rpsave.config import KeepBestConfig


def steps_to_delete(
    steps: Mapping[int, Mapping[str, float] | None],
    *,
    max_to_keep: int | None,
    keep_period: int | None,
    keep_best: KeepBestConfig | None,
) -> list[int]:
    """The steps that no rule keeps.

    Kept are the newest `max_to_keep` steps, always the newest one, every step divisible by `keep_period`, and the best
    `keep_best.n` by their metric. A step whose metric is missing, NaN or not a number is never among the best, even
    where there are fewer than n; of equal metrics the newer step's is the better.

    Args:
        steps: committed, undamaged step → its metrics. Damaged ones must not be counted: they would push good ones out.
        max_to_keep: at least 1, or None, which keeps all.
        keep_period: at least 1, or None.
        keep_best: metric, mode and number of the best steps to keep besides, or None.

    Returns:
        The steps to delete, ascending: where deletion is interrupted, the newer ones are still there.

    Example:
        >>> steps_to_delete({10: None, 20: None, 30: None}, max_to_keep=1, keep_period=20, keep_best=None)
        [10]
    """
    if max_to_keep is None:
        return []
    ascending = sorted(steps)
    kept = set(ascending[-max_to_keep:])
    if keep_period is not None:
        kept.update(step for step in ascending if step % keep_period == 0)
    if keep_best is not None:
        kept.update(_best(steps, keep_best))
    return [step for step in ascending if step not in kept]


def _best(steps: Mapping[int, Mapping[str, float] | None], rule: KeepBestConfig) -> list[int]:
    """The best steps by `rule`, at most `rule.n`, best first."""
    sign = 1 if rule.mode == "max" else -1
    ranked: list[tuple[float, int]] = []
    for step, metrics in steps.items():
        value: Any = (metrics or {}).get(rule.metric)  # from JSON, where it may be anything
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            continue
        number = float(value)
        if not math.isnan(number):
            ranked.append((sign * number, step))
    return [step for _, step in sorted(ranked, reverse=True)[: rule.n]]
