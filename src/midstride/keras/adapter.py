"""``adapters.ArrayAdapter`` for Keras 3: models, layers, optimizers, metrics, seed generators and variables.

What a variable holds is an array of the backend, and the backend's adapter copies and fills it.

``ms.RNG()`` has nothing of Keras's. Layers draw from seed generators of their own, which are a part of
their model's state; the global one, for ``keras.random`` without a seed, has no public access, and what
``fit()`` shuffles with lies in its data pipeline.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from midstride.adapters import ArrayAdapter, ArrayLeaf, Destination, LiveObject, Report, adapter_of_lib
from midstride.errors import UnsupportedState
from midstride.keras import objects as keras_objects
from midstride.keras import optimizers
from midstride.tree import Node, Path, Tree, pointer

if int(keras.__version__.partition(".")[0]) < 3:
    raise UnsupportedState(
        f"objects of Keras {keras.__version__} cannot be saved, those of Keras 3 can. Nothing was written. "
        "Save {variable.name: variable for variable in model.variables}"
    )

_VARIABLE = [base for base in keras.Variable.__mro__ if base.__module__.startswith("keras.")][-1]
"""The root of all variables: those that layers make need not be of the public class, which is one of its branches."""

_BACKENDS = ("tensorflow", "torch")
_OBJECTS = (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.random.SeedGenerator)


class KerasAdapter:
    """On the TensorFlow and the PyTorch backend."""

    lib = "keras"
    """In no manifest: arrays are the backend's."""

    def leaf(self, value: Any, path: Path) -> ArrayLeaf | None:
        variable = isinstance(value, _VARIABLE)
        if isinstance(value, keras.KerasTensor):
            raise _refused(path, "a KerasTensor stands for an input or output of layers, and has no value")
        if not variable and not isinstance(value, _OBJECTS):
            return None
        if keras.config.backend() not in _BACKENDS:
            raise _refused(
                path,
                f"on the {keras.config.backend()} backend Keras keeps the state of a running fit() outside of its "
                f"variables, and it cannot be saved; on {' and '.join(_BACKENDS)} it can",
            )
        if not variable:
            return None
        if getattr(value, "_value", value) is None:
            raise _refused(path, f"the variable {value.path} has no value yet")
        leaf = _backend().leaf(value.value, path)
        assert leaf is not None
        leaf.variable = True
        return leaf

    def memory_key(self, value: Any) -> tuple[Any, ...]:
        return _backend().memory_key(value.value)

    def object_state(self, value: Any) -> tuple[Any, dict[str, Any]] | None:
        if isinstance(value, keras.optimizers.Optimizer):
            return optimizers.state_of(value), {}
        return (keras_objects.variables_of(value), {}) if isinstance(value, _OBJECTS) else None

    def annotate(self, objects: list[LiveObject]) -> None:
        for live in objects:
            if isinstance(live.value, keras.optimizers.Optimizer):
                live.notes.update(optimizers.notes(live.value, objects))
            elif isinstance(live.value, keras.Layer):
                keras_objects.check_built(live)

    def synchronize(self, leaves: list[ArrayLeaf]) -> None:
        raise TypeError(_NO_ARRAYS)

    def view(self, leaf: ArrayLeaf, out: np.ndarray) -> Any:
        raise TypeError(_NO_ARRAYS)

    def copy(self, leaves: list[ArrayLeaf], views: list[Any]) -> None:
        raise TypeError(_NO_ARRAYS)

    def copy_part(self, leaf: ArrayLeaf, first: int, last: int, out: np.ndarray) -> None:
        raise TypeError(_NO_ARRAYS)

    def new_array(self, dtype: str, shape: tuple[int, ...], like: Any = None) -> Destination:
        return _backend().new_array(dtype, shape, like.value if like is not None else None)

    def fill(self, value: Any) -> Destination:
        return _backend().fill(value.value)

    def convert(self, array: Any, like: Any, *, in_place: bool) -> Any:
        return _backend().convert(array, like.value, in_place=in_place)

    def is_object(self, value: Any) -> bool:
        return isinstance(value, _OBJECTS)

    def fit(self, value: Any, saved: Node, objects: list[LiveObject], report: Report) -> tuple[Tree, Any]:
        if isinstance(value, keras.optimizers.Optimizer):
            return optimizers.fit(value, saved, objects, report)
        return keras_objects.fit(value, saved, objects, report)

    def load(self, value: Any, state: Any, saved: Node, strict: bool) -> None:
        keras_objects.load(value)


_NO_ARRAYS = "Keras has no arrays of its own"


def _backend() -> ArrayAdapter:
    adapter = adapter_of_lib(keras.config.backend())
    assert adapter is not None
    return adapter


def _refused(path: Path, why: str) -> UnsupportedState:
    return UnsupportedState(f"{pointer(path) or '/'}: {why}. Nothing was written")


ADAPTER = KerasAdapter()
