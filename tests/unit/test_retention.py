"""Which checkpoints stay."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstride.info import CheckpointInfo
from midstride.retention import BestN, EveryNSteps, LatestN, Retention, UnionOf, as_retention, best_of, to_retire


def info(seq: int, step: int | None = None, **metrics: float | int | None) -> CheckpointInfo:
    step = seq * 10 if step is None else step
    return CheckpointInfo(step, seq, None, "run", f"step-{step}-{seq}", "2026-01-01T00:00:00+00:00", metrics)


def retired(policy: Retention, infos: list[CheckpointInfo]) -> list[int]:
    return [gone.seq for gone in to_retire(policy, infos)]


FIVE = [info(seq) for seq in (1, 2, 3, 4, 5)]


# What ``keep=`` may be.


def test_keep_means() -> None:
    assert as_retention(None) is None
    assert as_retention(3) == LatestN(3)
    rule = LatestN(2) | EveryNSteps(100)
    assert as_retention(rule) is rule


@pytest.mark.parametrize(
    ("keep", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError), ("3", TypeError)]
)
def test_what_makes_no_sense_is_refused(keep: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="keep"):
        as_retention(keep)


@pytest.mark.parametrize("n", [0, -1, True, 1.0, "1", None])
@pytest.mark.parametrize("make", [LatestN, EveryNSteps, lambda n: BestN(n, "loss", "min")])
def test_rules_take_positive_whole_numbers(make: Any, n: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        make(n)


def test_mode_is_min_or_max() -> None:
    with pytest.raises(ValueError, match="'min' or 'max', not 'lowest'"):
        BestN(1, "loss", "lowest")
    with pytest.raises(ValueError, match="'min' or 'max'"):
        best_of(FIVE, "loss", "")


# Latest.


def test_latest_goes_by_seq_whatever_the_order_and_the_step() -> None:
    infos = [info(3, step=10), info(1, step=900), info(2, step=500)]
    assert LatestN(2).kept(infos) == {3, 2}
    assert retired(LatestN(2), infos) == [1]


def test_what_goes_is_named_from_the_oldest_on() -> None:
    assert retired(LatestN(2), FIVE[::-1]) == [1, 2, 3]


def test_fewer_than_asked_for_all_stay() -> None:
    assert retired(LatestN(9), FIVE) == []
    assert retired(LatestN(1), []) == []


# Every so many steps.


def test_every_n_steps_keeps_multiples() -> None:
    infos = [info(1, step=0), info(2, step=50), info(3, step=100), info(4, step=101)]
    assert EveryNSteps(100).kept(infos) == {1, 3}
    assert retired(EveryNSteps(100), infos) == [2]


# Best.


def test_best_by_lowest_and_by_highest() -> None:
    infos = [info(1, loss=3.0), info(2, loss=1.0), info(3, loss=2.0)]
    assert BestN(1, "loss", "min").kept(infos) == {2}
    assert BestN(2, "loss", "max").kept(infos) == {1, 3}


def test_of_equals_the_newer_is_better() -> None:
    infos = [info(1, loss=1.0), info(2, loss=1), info(3, loss=1.0)]
    assert BestN(2, "loss", "min").kept(infos) == {3, 2}
    assert BestN(2, "loss", "max").kept(infos) == {3, 2}
    best = best_of(infos, "loss", "max")
    assert best is not None and best.seq == 3


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_not_a_finite_number_is_never_best(odd: float | None, mode: str) -> None:
    infos = [info(1, loss=odd), info(2), info(3, loss=5.0), info(4, accuracy=0.0, loss=odd)]
    assert BestN(3, "loss", mode).kept(infos) == {3}
    best = best_of(infos, "loss", mode)
    assert best is not None and best.seq == 3


def test_none_has_the_metric() -> None:
    assert BestN(1, "loss", "min").kept(FIVE) == set()
    assert best_of(FIVE, "loss", "min") is None
    assert retired(BestN(1, "loss", "min"), FIVE) == [1, 2, 3, 4]


def test_ints_too_large_for_a_float_are_compared_exactly() -> None:
    infos = [info(1, tokens=2**62 + 1), info(2, tokens=2**62), info(3, tokens=1e300)]
    assert BestN(2, "tokens", "min").kept(infos) == {1, 2}
    assert BestN(1, "tokens", "max").kept(infos[:2]) == {1}
    assert BestN(1, "tokens", "max").kept([*infos, info(4, tokens=10**400)]) == {4}


# Together.


def test_or_keeps_what_any_rule_keeps() -> None:
    infos = [info(1, step=100, loss=9.0), info(2, step=110, loss=1.0), info(3, step=120, loss=5.0), info(4, step=130)]
    rule = LatestN(1) | BestN(1, "loss", "min") | EveryNSteps(100)
    assert rule.kept(infos) == {4, 2, 1}
    assert retired(rule, infos) == [3]


def test_or_makes_one_flat_list() -> None:
    parts = LatestN(1), EveryNSteps(5), BestN(1, "loss", "min")
    assert (parts[0] | parts[1]) | parts[2] == UnionOf(parts) == parts[0] | (parts[1] | parts[2])
    with pytest.raises(TypeError):
        _ = LatestN(1) | 3  # type: ignore[operator]


metrics = st.none() | st.floats() | st.integers(-(2**70), 2**70)
rules = st.recursive(
    st.builds(LatestN, st.integers(1, 4))
    | st.builds(EveryNSteps, st.integers(1, 7))
    | st.builds(BestN, st.integers(1, 4), st.sampled_from(["loss", "other"]), st.sampled_from(["min", "max"])),
    lambda inner: st.builds(lambda a, b: a | b, inner, inner),
    max_leaves=4,
)


@given(rules, st.lists(st.tuples(st.integers(0, 30), metrics), max_size=12), st.randoms())
def test_the_newest_always_stays_and_what_goes_is_in_order(rule: Retention, facts: list[Any], random: Any) -> None:
    infos = [info(seq, step, loss=loss) for seq, (step, loss) in enumerate(facts, 1)]
    random.shuffle(infos)
    gone = retired(rule, infos)
    assert gone == sorted(gone)
    assert len(infos) not in gone
    assert set(gone).isdisjoint(rule.kept(infos))
