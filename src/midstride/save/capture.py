"""What of a state must be copied now, and what may be read later.

A *fence* is the moment until which the caller's memory is known not to change. Here every array's
fence is "now": all of it is copied before ``save()`` returns. Values that are not arrays are
encoded here, at once.
"""

from __future__ import annotations

import contextlib
import gc
import json
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from midstride.adapters import ArrayLeaf
from midstride.errors import UnsupportedState
from midstride.format.layout import MAX_STEP
from midstride.format.values import encode_tree, encode_value
from midstride.state import walk


@dataclass(frozen=True, slots=True)
class Captured:
    """One moment of a state: its values, encoded, and its arrays, still in the caller's memory."""

    tree_json: str
    """The tree as JSON text; equal states have equal texts."""
    leaves: list[ArrayLeaf]


def capture(state: Any) -> Captured:
    """Take a state apart and encode its values. ``UnsupportedState`` names what cannot be saved."""
    try:
        walked = walk(state)
        tree_json = json.dumps(encode_tree(walked.tree), separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise UnsupportedState(
            "the state is nested too deep, or a state_dict() in it calls itself. Nothing was written"
        ) from None
    for adapter in {id(leaf.adapter): leaf.adapter for leaf in walked.leaves}.values():
        adapter.synchronize([leaf for leaf in walked.leaves if leaf.adapter is adapter])
    return Captured(tree_json, walked.leaves)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Put garbage collection off while a state is captured and staged.

    Ten thousand arrays make fifty thousand small objects that all live until they are staged: looking
    for garbage among them, and through the caller's whole heap, would cost more than the walk.
    """
    collecting = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if collecting:
            gc.enable()


def exact_step(step: Any) -> int:
    """A step as a Python int: any exact, non-negative integer (NumPy's and a 0-d tensor of integers too)."""
    if isinstance(step, bool) or str(getattr(step, "dtype", "")).endswith("bool"):
        raise TypeError(f"step must be an integer, not {step!r}")
    try:
        value = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an integer, not {step!r} of type {type(step).__name__}") from None
    if not 0 <= value <= MAX_STEP:
        raise ValueError(f"step must be between 0 and 2**63 - 1, not {value}")
    return value


def encode_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metrics for the manifest: int, float or None under str names; 0-d arrays and tensors are read.

    ``UnsupportedState`` names a metric of any other type.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a mapping of names to numbers, not {type(metrics).__name__}")
    return {_metric_name(name): encode_value(_number(name, value)) for name, value in metrics.items()}


def _metric_name(name: Any) -> str:
    if type(name) is not str:
        raise TypeError(f"a metric's name must be a str, not {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UnsupportedState(f"the metric name {name!r} is not valid Unicode text") from None
    return name


def _number(name: str, value: Any) -> int | float | None:
    if value is None or type(value) in (int, float):
        return value  # type: ignore[no-any-return]
    if not isinstance(value, (bool, np.bool_)) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        number = value.item()
        if type(number) in (int, float):
            return number  # type: ignore[no-any-return]
    raise UnsupportedState(
        f"the metric {name!r} is {value!r} of type {type(value).__name__}; metrics are int, float, None, "
        "or 0-d arrays and tensors of these. Nothing was written"
    )
