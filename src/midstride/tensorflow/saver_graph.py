"""What a ``tf.compat.v1.train.Saver`` writes, and the part of its graph that does the writing, told apart.

Above the saver's save tensor there are the ops that write tensors into files, and what names, shards and merges those
files. What these ops are given is the data; the rest depends on nothing but a file name, so it can be run elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

_FIRST_DATA_INPUT = {"SaveV2": 3, "SaveSlices": 3, "Save": 2}
"""The ops that write tensors into a file, and from which input on they are given them."""
_WRITING_OPS = frozenset({*_FIRST_DATA_INPUT, "MergeV2Checkpoints"})
_PASSING_OPS = frozenset({"Identity", "StopGradient"})
"""What returns its input's buffer, and nothing else."""


class NotSeparable(Exception):
    """Why the writing cannot be separated from the training session."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that the saver writes."""

    name: str
    dtype: Any
    origin: str
    """The type of the op that its buffer comes from."""

    @property
    def holdable(self) -> bool:
        """Its buffer is never written again while somebody else holds it."""
        return self.origin == "ReadVariableOp"


@dataclass(frozen=True, slots=True)
class Scratch:
    """A save op that is given variants: how to run it so that it writes them and nothing else of size."""

    op: str
    prefix: str
    replaced: tuple[tuple[str, np.ndarray], ...]
    variants: tuple[tuple[str, bytes], ...]
    """The tensor's name, and its key in the scratch file."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The saver's graph, taken apart. ``nodes`` are those from the sources, exclusive, to the save tensor."""

    sources: tuple[Source, ...] = ()
    scratches: tuple[Scratch, ...] = ()
    nodes: Any = None
    filename: str = ""
    result: str = ""


def take_apart(graph: Any, saver: Any) -> Plan:
    """Raises ``NotSeparable``, and ``ValueError`` for a saver of another graph."""
    if is_empty(saver):
        return Plan()
    saver_def = getattr(saver, "saver_def", None)
    if saver_def is None:
        raise NotSeparable("the saver has no saver_def; it was not built, or is of another kind")
    try:
        result = graph.get_tensor_by_name(saver_def.save_tensor_name)
        filename = graph.get_tensor_by_name(saver_def.filename_tensor_name)
    except KeyError as error:
        raise ValueError(f"the saver is of another graph: {error.args[0]}") from error
    nodes = graph_pb2.GraphDef(versions=graph.graph_def_versions)
    data: dict[str, Any] = {}
    scratches = []
    for op in _reach([result.op], {filename.op.name}, _control_side):
        _refuse_what_needs_the_session(op)
        nodes.node.append(_private_node(op))
        given = _data_inputs(op)
        data |= {tensor.name: tensor for tensor in given}
        if any(tensor.dtype == tf.variant for tensor in given):
            scratches.append(_scratch(op, given))
    if not data:
        raise NotSeparable(f"no op that writes tensors is above {result.name}")
    for op in _reach([tensor.op for tensor in data.values()], set(), lambda op: list(op.inputs)):
        if op.type in _WRITING_OPS or op.name == filename.op.name:
            raise NotSeparable(f"what is saved depends on {op.name}, a part of the saving")
    sources = [
        Source(tensor.name, tensor.dtype.base_dtype, _origin(tensor))
        for tensor in data.values()
        if tensor.dtype != tf.variant
    ]
    return Plan(tuple(sources), tuple(scratches), nodes, filename.name, result.name)


def _reach(first: list[Any], stop: set[str], inputs: Callable[[Any], list[Any]]) -> list[Any]:
    """The ops above, these included; ``inputs`` are the tensors to follow, control inputs are always followed."""
    found: dict[str, Any] = {}
    todo = list(first)
    while todo:
        op = todo.pop()
        if op.name not in found and op.name not in stop:
            found[op.name] = op
            todo += [tensor.op for tensor in inputs(op)] + list(op.control_inputs)
    return list(found.values())


def _data_inputs(op: Any) -> list[Any]:
    return list(op.inputs)[_FIRST_DATA_INPUT[op.type] :] if op.type in _FIRST_DATA_INPUT else []


def _control_side(op: Any) -> list[Any]:
    return list(op.inputs)[: _FIRST_DATA_INPUT.get(op.type)]


def _origin(tensor: Any) -> str:
    while tensor.op.type in _PASSING_OPS:
        tensor = tensor.op.inputs[0]
    return str(tensor.op.type)


def _refuse_what_needs_the_session(op: Any) -> None:
    definition = op.op_def
    if op.type not in _WRITING_OPS and definition.is_stateful:
        raise NotSeparable(f"{op.name} is a {op.type}, which has state in the session")
    if any(attribute.type.endswith(("func", "func)")) for attribute in definition.attr):
        raise NotSeparable(f"{op.name} is a {op.type}, which calls functions")


def _private_node(op: Any) -> Any:
    node = type(op.node_def)()
    node.CopyFrom(op.node_def)
    node.device = ""
    node.attr.pop("_class", None)  # where it is colocated
    return node


def _scratch(op: Any, given: list[Any]) -> Scratch:
    variants = [tensor for tensor in given if tensor.dtype == tf.variant]
    keys = tf.get_static_value(op.inputs[1])
    if op.type != "SaveV2" or keys is None:
        raise NotSeparable(f"{variants[0].name} is a variant, which {op.name} cannot write by itself")
    key = {tensor.name: keys[number] for number, tensor in enumerate(given)}
    whole = np.full(len(given), b"", object)
    replaced = {op.inputs[2].name: whole}
    replaced |= {tensor.name: _scalar(tensor.dtype.base_dtype) for tensor in given if tensor.dtype != tf.variant}
    return Scratch(
        op.name,
        op.inputs[0].name,
        tuple(replaced.items()),
        tuple((tensor.name, key[tensor.name]) for tensor in variants),
    )


def _scalar(dtype: Any) -> np.ndarray:
    return np.asarray(b"", object) if dtype == tf.string else np.zeros((), dtype.as_numpy_dtype)


def is_empty(saver: Any) -> bool:
    return bool(getattr(saver, "_is_empty", False))
