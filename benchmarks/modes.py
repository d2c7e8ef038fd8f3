"""The page's part about this project's ways to save: what each needs of memory, and what it costs."""

import statistics

from benchmarks.measures import BLOCKING, COMMIT, CPU, PEAK
from benchmarks.peers import PEERS
from benchmarks.tables import NOTHING, Results, engines_of, spread, table, trials
from benchmarks.targets import verdict

CASE = "gpt2_small_modes"
BUDGET_TARGET = 1.1
"""Of a budget: the most that a save may need of memory."""
_PLAIN = "rpsave"


def budget_rows(results: Results) -> list[list[str]]:
    """Verdicts: whether each budget was kept."""
    rows = []
    for peer in PEERS:
        budgets = [trial["budget_bytes"] for trial in trials(results, "save", CASE, peer) if "budget_bytes" in trial]
        if budgets:
            peaks = [peak * PEAK.unit for peak in PEAK.values(results, CASE, peer)]
            against = f"the budget of {PEERS[peer].label}"
            rows.append(verdict("peak memory of a save", against, peaks, budgets, BUDGET_TARGET))
    return rows


def modes_table(results: Results) -> list[str]:
    """A mode a row."""
    measures = (PEAK, BLOCKING, COMMIT, CPU)
    plain = BLOCKING.values(results, CASE, _PLAIN)
    rows = []
    for peer in PEERS:
        measured = trials(results, "save", CASE, peer)
        if not measured:
            continue
        budgets = [trial["budget_bytes"] / 1e9 for trial in measured if "budget_bytes" in trial]
        values, more = BLOCKING.values(results, CASE, peer), NOTHING
        if plain and values and peer != _PLAIN:
            more = f"{statistics.median(values) - statistics.median(plain):+.3f}"
        rows.append(
            [
                PEERS[peer].label,
                spread(budgets, 3),
                *(spread(each.values(results, CASE, peer), each.digits) for each in measures),
                more,
                engines_of(results, CASE, peer),
            ]
        )
    headings = [each.heading for each in measures]
    return table(["", "budget, GB", *headings, "blocks longer than without, s", "engine"], rows)
