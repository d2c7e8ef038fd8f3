import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_rpsave.config import KeepBestConfig
from flax_rpsave.retention import steps_to_delete


def survivors(steps, *, max_to_keep=None, keep_period=None, keep_best=None):
    """The steps left over, after checking that the answer is an ascending part of them."""
    deleted = steps_to_delete(steps, max_to_keep=max_to_keep, keep_period=keep_period, keep_best=keep_best)
    assert deleted == sorted(set(deleted) & set(steps))
    return sorted(set(steps) - set(deleted))


def losses(**values):
    """Steps with a loss: `losses(s10=1.5)` is {10: {"loss": 1.5}}."""
    return {int(step[1:]): {"loss": value} for step, value in values.items()}


LOWEST = KeepBestConfig(metric="loss", mode="min", n=1)
HIGHEST = KeepBestConfig(metric="loss", mode="max", n=1)


@pytest.mark.parametrize(
    ("max_to_keep", "kept"),
    [(None, [9, 10, 100, 9000, 10000]), (1, [10000]), (2, [9000, 10000]), (5, [9, 10, 100, 9000, 10000])],
)
def test_newest_means_the_greatest_number_report_30(max_to_keep, kept):
    steps = dict.fromkeys([9000, 10, 10000, 9, 100])
    assert survivors(steps, max_to_keep=max_to_keep) == kept


def test_the_best_is_kept_besides_the_newest_report_51():
    steps = losses(s1=0.1, s2=0.9, s3=0.8, s4=0.7)
    assert survivors(steps, max_to_keep=2, keep_best=LOWEST) == [1, 3, 4]
    assert survivors(steps, max_to_keep=1, keep_best=HIGHEST) == [2, 4]


@pytest.mark.parametrize(
    ("best", "kept"),
    [(198_000, [198_000, 200_000]), (199_000, [199_000, 200_000]), (200_000, [200_000])],
)
def test_the_best_may_be_the_oldest_or_the_newest_report_52(best, kept):
    steps = {step: {"loss": 0.5 if step == best else 1.0} for step in (198_000, 199_000, 200_000)}
    assert survivors(steps, max_to_keep=1, keep_best=LOWEST) == kept


def test_a_best_that_is_among_the_newest_frees_no_further_place_report_52():
    steps = losses(s1=0.2, s2=0.9, s3=0.1, s4=0.5)
    assert survivors(steps, max_to_keep=2, keep_best=LOWEST) == [3, 4]


@pytest.mark.parametrize("worthless", [math.nan, None, "0.1", True, [0.1]])
@pytest.mark.parametrize("rule", [LOWEST, HIGHEST])
def test_a_metric_that_is_no_number_is_never_best(worthless, rule):
    steps = losses(s1=worthless, s2=0.5, s3=worthless, s4=worthless)
    assert survivors(steps, max_to_keep=1, keep_best=rule) == [2, 4]


def test_steps_without_the_metric_are_never_best_even_where_too_few_have_it():
    steps = {1: None, 2: {}, 3: {"accuracy": 1.0}, 4: {"loss": math.nan}, 5: {"loss": 3.0}, 6: None}
    assert survivors(steps, max_to_keep=1, keep_best=KeepBestConfig(metric="loss", mode="min", n=4)) == [5, 6]


def test_of_equal_metrics_the_newer_step_is_kept():
    steps = losses(s1=0.5, s2=0.5, s3=0.5, s4=0.9)
    assert survivors(steps, max_to_keep=1, keep_best=LOWEST) == [3, 4]
    assert survivors(losses(s1=0.9, s2=0.9, s3=0.1), max_to_keep=1, keep_best=HIGHEST) == [2, 3]


def test_an_infinite_metric_ranks_as_a_number():
    steps = losses(s1=math.inf, s2=1.0, s3=-math.inf, s4=0.0)
    assert survivors(steps, max_to_keep=1, keep_best=LOWEST) == [3, 4]
    assert survivors(steps, max_to_keep=1, keep_best=HIGHEST) == [1, 4]


def test_a_step_divisible_by_the_period_is_never_deleted():
    steps = dict.fromkeys([0, 500, 1000, 1500, 2000, 2500])
    assert survivors(steps, max_to_keep=1, keep_period=1000) == [0, 1000, 2000, 2500]


def test_nothing_is_deleted_where_all_are_kept():
    steps = losses(s1=1.0, s2=2.0, s3=3.0)
    assert survivors(steps, keep_period=2, keep_best=LOWEST) == [1, 2, 3]


def test_without_steps_there_is_nothing_to_delete():
    assert survivors({}, max_to_keep=1, keep_period=1, keep_best=LOWEST) == []


VALUES = st.floats() | st.integers(-2, 2) | st.sampled_from([None, "0.1"])
METRICS = st.none() | st.dictionaries(st.sampled_from(["loss", "accuracy"]), VALUES)
STEPS = st.dictionaries(st.integers(0, 300), METRICS, max_size=25)
RULES = st.fixed_dictionaries(
    {
        "max_to_keep": st.none() | st.integers(1, 10),
        "keep_period": st.none() | st.integers(1, 50),
        "keep_best": st.none()
        | st.builds(
            KeepBestConfig,
            metric=st.sampled_from(["loss", "accuracy"]),
            mode=st.sampled_from(["min", "max"]),
            n=st.integers(1, 5),
        ),
    }
)


def number_of(steps, step, rule):
    """The metric of the step as a number; None where it is none."""
    value = (steps[step] or {}).get(rule.metric)
    return value if isinstance(value, int | float) and not math.isnan(value) else None


@given(STEPS, RULES)
def test_the_newest_steps_are_never_deleted(steps, rules):
    newest = sorted(steps)[-(rules["max_to_keep"] or len(steps)) :]
    assert set(newest) <= set(survivors(steps, **rules))
    assert not steps or max(steps) in survivors(steps, **rules)


@given(STEPS, RULES)
def test_every_survivor_has_a_reason_and_no_deleted_step_has_one(steps, rules):
    kept = survivors(steps, **rules)
    newest = sorted(steps)[-(rules["max_to_keep"] or len(steps)) :]
    period, rule = rules["keep_period"], rules["keep_best"]
    for step in steps:
        reasons = [step in newest, bool(period) and step % period == 0]
        if rule is not None and (own := number_of(steps, step, rule)) is not None:
            others = {other: number_of(steps, other, rule) for other in steps}
            better = [
                other
                for other, value in others.items()
                if value is not None
                and ((value < own if rule.mode == "min" else value > own) or (value == own and other > step))
            ]
            reasons.append(len(better) < rule.n)
        assert (step in kept) == any(reasons)


@given(STEPS, RULES)
def test_the_order_in_which_steps_are_listed_does_not_matter(steps, rules):
    assert steps_to_delete(dict(reversed(steps.items())), **rules) == steps_to_delete(steps, **rules)


@given(STEPS, RULES)
def test_deleting_twice_deletes_no_more(steps, rules):
    left = {step: steps[step] for step in survivors(steps, **rules)}
    assert steps_to_delete(left, **rules) == []
