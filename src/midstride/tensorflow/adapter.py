"""``adapters.ArrayAdapter`` for TensorFlow: variables, tensors and ``tf.random.Generator``, in eager mode.

A variable's value is held as a tensor from the moment of capture: that costs no copy, since the variable
and the tensor share their buffer until the next update, which makes itself another. The bytes are then
copied into the arena once, from a view of that buffer.

``ms.RNG()`` has nothing of TensorFlow's. The state of ``tf.random.normal`` and its like lies inside the
kernels, where nothing can read it; with the rest alone, "the random state is saved" would be untrue. A
``tf.random.Generator`` can be saved, the global one too: it is an object to put into the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from midstride.adapters import ArrayLeaf, Destination, LiveObject, Report
from midstride.dtypes import DTYPES, array_nbytes
from midstride.errors import StateMismatch, UnsupportedState
from midstride.tree import Node, Path, Tree, pointer


def _known_dtypes() -> dict[str, tf.DType]:
    found = {}
    for name in DTYPES:
        try:
            found[name] = tf.as_dtype(name)
        except TypeError:  # this TensorFlow lacks it
            continue
    return found


_DTYPES = _known_dtypes()

_BITCAST = frozenset(
    _DTYPES[name]
    for name in (
        "bfloat16", "float16", "float32", "float64", "complex64", "complex128",
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    )
)  # fmt: skip
"""What ``tf.bitcast`` makes of bytes."""

_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices, tf.TensorArray)

_ALIGNMENT_BYTES = 64
"""Of memory that TensorFlow takes for its own without a copy."""

_HANDED_OVER_BYTES = 64 * 1024
"""Size from which a tensor takes over memory: below, a copy costs less than the two operations."""


@dataclass(slots=True)
class _TensorLeaf(ArrayLeaf):
    held: Any = None
    """The value at the moment of capture: an eager tensor."""


class TensorFlowAdapter:
    """``tf.Variable``, eager ``tf.Tensor`` and ``tf.random.Generator``."""

    lib = "tensorflow"

    def leaf(self, value: Any, path: Path) -> ArrayLeaf | None:
        variable = isinstance(value, tf.Variable)
        if not variable and not isinstance(value, tf.Tensor):
            if isinstance(value, _COMPOSITE):
                raise _refused(path, f"a {type(value).__name__} is made of several tensors; save these")
            return None
        if _in_graph(value, variable):
            raise _refused(
                path,
                "TensorFlow's state can be saved in eager mode only, and this is part of a graph. In a session use "
                "midstride.tensorflow.AsyncCheckpointSaverHook; in a tf.function, save outside of it",
            )
        name = value.dtype.name
        if name not in _DTYPES:
            raise _refused(path, _why_dtype(value.dtype))
        if not value.shape.is_fully_defined():
            raise _refused(
                path,
                f"a variable of shape {value.shape} may have another shape at each save. Save its read_value(), and "
                "assign() what a restore gives",
            )
        shape = tuple(value.shape.as_list())
        nbytes = array_nbytes(name, shape)
        # The same object is the same memory; two variables may share a buffer, and only until one is updated.
        return _TensorLeaf(path, name, shape, nbytes, value, id(value) if nbytes else None, self, variable)

    def memory_key(self, value: Any) -> tuple[Any, ...]:
        return (id(value),)

    def object_state(self, value: Any) -> tuple[Any, dict[str, Any]] | None:
        if isinstance(value, tf.random.Generator):
            return {"state": value.state}, {"algorithm": int(value.algorithm)}
        return None

    def annotate(self, objects: list[LiveObject]) -> None:
        pass

    def synchronize(self, leaves: list[ArrayLeaf]) -> None:
        with tf.init_scope():  # a gradient tape takes no notice
            for leaf in leaves:
                assert isinstance(leaf, _TensorLeaf)
                leaf.held = _value_of(leaf)

    def view(self, leaf: ArrayLeaf, out: np.ndarray) -> np.ndarray:
        return out

    def copy(self, leaves: list[ArrayLeaf], views: list[np.ndarray]) -> None:
        for leaf, view in zip(leaves, views, strict=True):
            assert isinstance(leaf, _TensorLeaf)
            np.copyto(view, _bytes_of(leaf.held))

    def copy_part(self, leaf: ArrayLeaf, first: int, last: int, out: np.ndarray) -> None:
        assert isinstance(leaf, _TensorLeaf)
        itemsize = DTYPES[leaf.dtype].itemsize
        if _on_cpu(leaf.held):
            np.copyto(out, _bytes_of(leaf.held)[first * itemsize : last * itemsize])
        else:
            np.copyto(out, _bytes_of(tf.reshape(leaf.held, [-1])[first:last]))

    def new_array(self, dtype: str, shape: tuple[int, ...], like: Any = None) -> Destination:
        if dtype not in _DTYPES:
            raise StateMismatch(f"TensorFlow has no dtype {dtype}; restore this array into NumPy")
        buffer = _aligned_memory(array_nbytes(dtype, shape))
        return Destination(buffer, lambda: _placed(_tensor(buffer, dtype, shape), like))

    def fill(self, value: Any) -> Destination:
        # A variable is never written into: others may share its buffer. It takes this memory for its own.
        fresh = self.new_array(value.dtype.name, tuple(value.shape.as_list()))

        def finish() -> Any:
            value.assign(fresh.finish(), read_value=False)
            return value

        return Destination(fresh.buffer, finish)

    def convert(self, array: Any, like: Any, *, in_place: bool) -> Any:
        # NumPy's conversions, so that a cast gives the same numbers in every framework.
        converted = tf.constant(_array_of(array).astype(like.dtype.as_numpy_dtype), like.dtype)
        if not in_place:
            return _placed(converted, like)
        like.assign(converted, read_value=False)
        return like

    def is_object(self, value: Any) -> bool:
        return isinstance(value, tf.random.Generator)

    def fit(self, value: Any, saved: Node, objects: list[LiveObject], report: Report) -> tuple[Tree, Any]:
        theirs, mine = (saved.extra or {}).get("algorithm"), int(value.algorithm)
        if theirs not in (None, mine):
            report.problems.append(f"the generator's algorithm is {mine}, in the checkpoint {theirs}")
        return saved.children[0], {"state": value.state}

    def load(self, value: Any, state: Any, saved: Node, strict: bool) -> None:
        pass  # its variable has been assigned


def _refused(path: Path, why: str) -> UnsupportedState:
    return UnsupportedState(f"{pointer(path) or '/'}: {why}. Nothing was written")


def _why_dtype(dtype: tf.DType) -> str:
    if dtype == tf.string:
        return "tensors of strings cannot be saved; save tensor.numpy().tolist()"
    if dtype in (tf.resource, tf.variant):
        return f"a tensor of dtype {dtype.name} is a handle to something else, and cannot be saved"
    return f"tensors of dtype {dtype.name} cannot be saved"


def _in_graph(value: Any, variable: bool) -> bool:
    if not tf.executing_eagerly():
        return True
    if not variable:
        return bool(tf.is_symbolic_tensor(value))
    if isinstance(value, tf.distribute.DistributedValues):
        return False  # has no handle of its own
    # A variable of the old kind, which only graphs have, has none either.
    return not hasattr(value, "handle") or bool(tf.is_symbolic_tensor(value.handle))


def _value_of(leaf: ArrayLeaf) -> Any:
    value = leaf.source
    if not leaf.variable:
        return value
    try:
        if isinstance(value, tf.distribute.DistributedValues):
            held = value.read_value()
        else:  # what read_value() does, at a third of its cost
            held = tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype)
    except tf.errors.FailedPreconditionError as error:
        raise _refused(leaf.path, f"the variable {value.name} has no value yet") from error
    if held.shape != value.shape:  # so it is told in eager mode
        raise _refused(leaf.path, f"the variable {value.name} has no value yet")
    return held


def _bytes_of(tensor: Any) -> np.ndarray:
    """A tensor's bytes; on the CPU a view of its buffer, which the view keeps alive."""
    return _array_of(tensor).reshape(-1).view(np.uint8)


def _array_of(tensor: Any) -> np.ndarray:
    # Of a tensor without dimensions TensorFlow's __array__() gives a scalar, which NumPy refuses.
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


def _on_cpu(tensor: Any) -> bool:
    return "CPU" in tensor.device.upper().rpartition("DEVICE:")[2]


def _aligned_memory(nbytes: int) -> np.ndarray:
    # NumPy's allocator asks for huge pages, TensorFlow's does not: filling fresh memory is then bound by
    # the disk and not by page faults.
    memory = np.empty(nbytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + nbytes]


def _tensor(buffer: np.ndarray, name: str, shape: tuple[int, ...]) -> Any:
    """A tensor of these bytes; where TensorFlow can, over this very memory, which is then TensorFlow's alone."""
    dtype = _DTYPES[name]
    with tf.device("CPU:0"):
        if buffer.size < _HANDED_OVER_BYTES or dtype not in _BITCAST:
            return tf.constant(buffer.view(dtype.as_numpy_dtype).reshape(shape), dtype)
        # Handed over as bytes, because dlpack does not know ml_dtypes' dtypes.
        packed = buffer.reshape(shape if dtype.size == 1 else (*shape, dtype.size))
        return tf.bitcast(tf.experimental.dlpack.from_dlpack(packed.__dlpack__()), dtype)


def _placed(tensor: Any, like: Any) -> Any:
    if like is None or like.device == tensor.device:
        return tensor
    with tf.device(like.device):
        return tf.identity(tensor)


ADAPTER = TensorFlowAdapter()
