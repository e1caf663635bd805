"""The machine stops at every operation of a run, and loses what was not synced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import midstride as ms
from midstride.testing import FaultyStorage, VolatileStorage, stop_after
from tests.crash.broken import POWER_LOSS
from tests.crash.runs import RUNS, Acknowledged, leftovers, problems, state_of

SEEDS = 60 if os.environ.get("MIDSTRIDE_LONG") else 4


def crash(
    run: Callable[..., None], stop: int, wrap: Callable[[Any], Any]
) -> tuple[bool, VolatileStorage, Acknowledged]:
    """Run until operation ``stop`` has taken effect; whether it came to that, what is there, what was said."""
    volatile = VolatileStorage()
    faulty = FaultyStorage(volatile, stop_after(stop))
    said: Acknowledged = []
    with contextlib.suppress(ms.MidstrideError):
        run(wrap(faulty), said)
    return len(faulty.operations) >= stop, volatile, said


def sweep(run: Callable[..., None], wrap: Callable[[Any], Any] = lambda s: s) -> Iterator[tuple[str, list[str]]]:
    """Every stop and everything that a crash there may leave: where, and what is wrong."""
    stop = 1
    while True:
        reached, volatile, said = crash(run, stop, wrap)
        for number, image in enumerate(volatile.crashes(SEEDS)):
            yield f"stop {stop}, crash {number}", problems(image, said)
        if not reached:
            return
        stop += 1


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_nothing_is_lost(run: Callable[..., None]) -> None:
    cases = list(sweep(run))
    assert [(where, wrong) for where, wrong in cases if wrong] == []
    assert len(cases) > 200  # the sweep did reach the run's end, one operation at a time


@pytest.mark.parametrize("broken", POWER_LOSS.values(), ids=POWER_LOSS.keys())
def test_the_sweep_notices_a_broken_commit(broken: Callable[[Any], Any]) -> None:
    assert any(wrong for run in RUNS.values() for _, wrong in sweep(run, broken))


def test_what_a_dead_run_showed_is_made_durable_by_the_next() -> None:
    """A run dies between the rename and the sync; the next one has seen the checkpoint, and a crash must not take it."""
    stop, seen = 1, 0
    while True:
        reached, volatile, _ = crash(RUNS["two_saves"], stop, lambda s: s)
        if not reached:
            break
        stop += 1
        ckpt = ms.Checkpointer(volatile)
        restored = ckpt.restore()
        if restored is None:
            continue
        seen += 1
        ckpt._open_run()
        for image in volatile.crashes(SEEDS):
            latest = ms.open(image).latest()
            assert latest is not None
            assert latest.seq >= restored.info.seq, stop
    assert seen > 10


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_the_next_run_clears_up_and_goes_on(run: Callable[..., None]) -> None:
    stop, reached = 1, True
    while reached:
        reached, volatile, _ = crash(run, stop, lambda s: s)
        for image in volatile.crashes(2):
            with ms.Checkpointer(image) as ckpt:
                ckpt.restore()
                ckpt.save(9, state_of(9)).result()
            assert ms.open(image).load()["value"] == 9
            assert leftovers(image) == [], stop
        stop += 1
