"""The ways in which the acceptance cases are run. TensorFlow is imported by the tests, not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Way:
    """One kind of hook, and what must happen before a test may look at what it did."""

    name: str
    make: Callable[..., Any]
    settle: Callable[[Any], None]

    def loop(self, task: Any, hook: Any, *, created: bool = False) -> AbstractContextManager[Any]:
        from tests.frameworks.tensorflow.training import loop

        return loop(task, hook, created=created, settle=lambda: self.settle(hook))


@pytest.fixture(params=["oracle", "blocking", "async"])
def way(request: pytest.FixtureRequest) -> Way:
    """``oracle``: TensorFlow's own hook. ``blocking``: ours in the foreground. ``async``: ours, waited for."""
    import tensorflow as tf

    from tests.frameworks.tensorflow.training import WATCHDOG_SECONDS, ours

    def make_blocking(*arguments: Any, **options: Any) -> Any:
        return ours(*arguments, **options, blocking=True)

    def nothing(hook: Any) -> None: ...

    def wait(hook: Any) -> None:
        hook.wait(timeout=WATCHDOG_SECONDS)

    if request.param == "oracle":
        return Way("oracle", tf.compat.v1.train.CheckpointSaverHook, nothing)
    pytest.importorskip("midstride.tensorflow")
    if request.param == "blocking":
        return Way("blocking", make_blocking, nothing)
    return Way("async", ours, wait)


@pytest.fixture(autouse=True)
def _no_summary_writer_outlives_its_test() -> Iterator[None]:
    """TensorFlow keeps one summary writer a folder for the life of the process, each with a thread."""
    import tensorflow as tf

    yield
    tf.compat.v1.summary.FileWriterCache.clear()
