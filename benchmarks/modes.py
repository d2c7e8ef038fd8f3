"""The page's part about this project's ways to save: what each needs of memory, and what it costs."""

import statistics

from benchmarks.peers import PEERS
from benchmarks.tables import Measure, Results, spread, table, trials

CASE = "gpt2_small_modes"
_PLAIN = "rpsave"


def modes_table(results: Results, measures: tuple[Measure, ...], blocking: Measure) -> list[str]:
    """A mode a row.

    Args:
        measures: the columns beside the budget and what keeping it costs.
        blocking: what the call blocks.
    """
    plain = blocking.values(results, CASE, _PLAIN)
    rows = []
    for peer in PEERS:
        measured = trials(results, "save", CASE, peer)
        if not measured:
            continue
        budgets = [trial["budget_bytes"] / 1e9 for trial in measured if "budget_bytes" in trial]
        values, more = blocking.values(results, CASE, peer), "–"
        if plain and values and peer != _PLAIN:
            more = f"{statistics.median(values) - statistics.median(plain):+.3f}"
        engines = {own.get("engine", "–") for trial in measured for save in trial["saves"] for own in save["own_stats"]}
        rows.append(
            [
                PEERS[peer].label,
                spread(budgets, 3),
                *(spread(each.values(results, CASE, peer), each.digits) for each in measures),
                more,
                ", ".join(sorted(engines)),
            ]
        )
    headings = [each.heading for each in measures]
    return table(["", "budget, GB", *headings, "blocks longer than without, s", "engine"], rows)
