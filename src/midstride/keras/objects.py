"""Layers, models, metrics and seed generators: their state is the variables that they list, by name.

A model's are its weights, the statistics of its normalizations and the states of its seed generators
(dropout); its optimizer and its metrics are objects of their own. What a layer learned in ``adapt()``
and keeps elsewhere than in variables, such as a vocabulary, is a part of how the model is built.
"""

from __future__ import annotations

from typing import Any

import keras

from midstride.adapters import LiveObject, Report
from midstride.errors import UnsupportedState
from midstride.keras.names import automatic_stems, by_name, match_names, renumbering_warning, unused
from midstride.tree import Node, Tree, pointer


def variables_of(value: Any) -> dict[str, Any]:
    """The variables of a layer, a metric or a seed generator by their names."""
    if isinstance(value, keras.random.SeedGenerator):
        return {"seed_generator_state": value.state}
    return by_name(value.variables)


def stems_of(value: Any) -> list[str]:
    """What Keras puts numbers behind in the names of this object's variables."""
    flatten = getattr(value, "_flatten_layers", None)
    return automatic_stems(flatten() if flatten is not None else [value])


def check_built(live: LiveObject) -> None:
    """Refuse to save a model or a layer whose weights were not yet made."""
    if _is_unbuilt(live.value):
        raise UnsupportedState(
            f"{pointer(live.path) or '/'}: the {_what(live.value)} has no weights yet. Nothing was written. "
            f"{_BUILD_IT} save()"
        )


def fit(value: Any, saved: Node, objects: list[LiveObject], report: Report) -> tuple[Tree, Any]:
    """The saved variables under the live object's names, and the live variables."""
    tree, live = saved.children[0], variables_of(value)
    if not isinstance(tree, Node) or tree.keys is None or isinstance(value, keras.random.SeedGenerator):
        return tree, live
    place = where(value, objects)
    if tree.keys and not live:
        how = "Use it once before" if isinstance(value, keras.metrics.Metric) else _BUILD_IT
        report.problems.append(f"{place}: the {_what(value)} has no variables yet. {how} restore()")
        return tree, None
    matched = match_names([key for key in tree.keys if type(key) is str], list(live), stems_of(value))
    report.warnings.extend(renumbering_warning(matched, place))
    if isinstance(value, keras.Layer) and len(matched) < len(tree.keys):
        report.problems.extend(_unbuilt_parts(value, place) if report.strict else [])
    return Node(tree.kind, tree.children, renamed_keys(tree.keys, matched)), live


def load(value: Any) -> None:
    """The variables have been assigned: make anew what layers derive from them."""
    if isinstance(value, keras.Layer):
        for layer in _layers(value):
            if isinstance(layer, keras.layers.Normalization):
                layer.finalize_state()


def where(value: Any, objects: list[LiveObject]) -> str:
    """The place of an object in the state, for a message."""
    path = next((live.path for live in objects if live.value is value), ())
    return pointer(path) or "/"


def renamed_keys(keys: list[Any], matched: dict[str, str]) -> list[Any]:
    """A saved node's keys under live names. A key that has none keeps its own, made distinct if that is taken."""
    taken = set(matched.values())
    renamed = []
    for key in keys:
        new = matched.get(key) if type(key) is str else key
        if new is None:
            new = unused(key, taken)
            taken.add(new)
        renamed.append(new)
    return renamed


_BUILD_IT = "Call build(input_shape), or run it once on a batch, before"


def _is_unbuilt(value: Any) -> bool:
    # Not built alone says little: a model whose parts are called one by one is never built itself.
    return isinstance(value, keras.Layer) and not value.built and not value.weights


def _unbuilt_parts(value: Any, place: str) -> list[str]:
    names = [layer.name for layer in _layers(value) if layer is not value and _is_unbuilt(layer)]
    if not names:
        return []
    return [
        f"{place}: layers of the {_what(value)} have no weights yet: {', '.join(names[:10])}. {_BUILD_IT} restore()"
    ]


def _layers(value: Any) -> list[Any]:
    flatten = getattr(value, "_flatten_layers", None)
    return list(flatten()) if flatten is not None else [value]


def _what(value: Any) -> str:
    return f"{type(value).__name__} {value.name!r}"
