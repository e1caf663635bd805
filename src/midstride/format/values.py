"""The state's tree and its plain values <-> strict JSON.

JSON's own null, true, false, strings and numbers stand for themselves: a number with a point or an
exponent is a float, any other an int; a JSON array is a list. Everything else is an object whose
``$`` says its kind, as docs/format.md lists. Nothing here can run code or import a class.
"""

from __future__ import annotations

import base64
import enum
import math
import pathlib
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  (registers its dtypes with NumPy)
import numpy as np

from midstride.errors import CorruptCheckpoint, UnsupportedState
from midstride.state import MAX_KEY_BITS
from midstride.tree import (
    CONTAINER_KINDS,
    MAX_DEPTH,
    ArrayRef,
    Node,
    Path,
    Tree,
    Value,
    is_hashable,
    pointer,
    type_name,
)

_MAX_LEVELS = 2 * MAX_DEPTH + 1  # an object's state is a level, and no step of a path
_EXACT_INT = 2**53  # above this, JSON readers of other languages round integers


def encode_tree(tree: Tree) -> Any:
    """The tree as JSON-ready data. ``UnsupportedState`` names the value that has no encoding."""
    return _encode(tree, ())


def _encode(tree: Tree, path: Path) -> Any:
    if isinstance(tree, ArrayRef):
        return {"$": "array", "i": tree.index}
    if isinstance(tree, Value):
        return encode_value(tree.value, path)
    keys = tree.keys if tree.keys is not None else range(len(tree.children))
    children = [_encode(child, (*path, key)) for key, child in zip(keys, tree.children, strict=True)]
    if tree.kind == "list":
        return children
    node: dict[str, Any] = {"$": tree.kind}
    if tree.type_name is not None:
        node["type"] = tree.type_name
    if tree.extra:
        node["extra"] = {key: _encode_note(value, path) for key, value in tree.extra.items()}
    if tree.keys is None:
        node["items"] = children
    elif all(type(key) is str for key in tree.keys):
        node["named"] = dict(zip(tree.keys, children, strict=True))
    else:
        node["pairs"] = [[encode_value(key, path), child] for key, child in zip(tree.keys, children, strict=True)]
    return node


def _encode_note(value: Any, path: Path) -> Any:
    if type(value) is list:
        return [_encode_note(item, path) for item in value]
    if type(value) is dict:
        return {"$": "dict", "named": {key: _encode_note(item, path) for key, item in value.items()}}
    return encode_value(value, path)


def encode_value(value: Any, path: Path = ()) -> Any:
    """A plain value (or a tuple of them, as keys may be) as JSON-ready data."""
    cls = type(value)
    if value is None or cls is bool:
        return value
    if cls is int:
        return value if -_EXACT_INT <= value <= _EXACT_INT else {"$": "int", "v": hex(value)}
    if cls is float:
        return value if math.isfinite(value) else {"$": "float", "v": repr(value)}
    if cls is str:
        return _encode_text(value)
    if cls is bytes:
        return {"$": "bytes", "v": base64.b64encode(value).decode()}
    if cls is complex:
        return {"$": "complex", "v": [encode_value(value.real), encode_value(value.imag)]}
    if cls is tuple:
        return {"$": "tuple", "items": [encode_value(item, path) for item in value]}
    if isinstance(value, enum.Enum):
        inner = encode_value(value.value, path)
        return {"$": "enum", "type": type_name(value), "name": value.name, "v": inner}
    if isinstance(value, np.generic):
        return _encode_scalar(value, path)
    if isinstance(value, pathlib.PurePath):
        return {"$": "path", "v": _encode_text(str(value))}
    raise UnsupportedState(f"{pointer(path)}: a value of type {type_name(value)} cannot be saved. Nothing was written")


def _encode_text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, as in file names of another encoding
        return {"$": "str", "v": base64.b64encode(value.encode("utf-16-le", "surrogatepass")).decode()}
    return value


def _encode_scalar(value: np.generic, path: Path) -> Any:
    name = value.dtype.name
    if value.dtype.hasobject or value.dtype.kind not in "biufcV" or value.dtype.names or name.startswith("void"):
        raise UnsupportedState(
            f"{pointer(path)}: a NumPy scalar of dtype {value.dtype} cannot be saved. Nothing was written"
        )
    if name in ("longdouble", "clongdouble", "float128", "complex256"):
        raise UnsupportedState(
            f"{pointer(path)}: {name} has no portable layout and cannot be saved. Nothing was written"
        )
    raw = value.astype(value.dtype.newbyteorder("<")).tobytes()
    return {"$": "numpy", "dtype": name, "v": raw.hex()}


def decode_tree(data: Any) -> Tree:
    """The tree back. ``CorruptCheckpoint`` for anything that ``encode_tree`` does not make."""
    try:
        return _decode(data, 0)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptCheckpoint(f"the manifest's tree is not understood: {error!r}") from error


def _decode(data: Any, depth: int) -> Tree:
    if depth > _MAX_LEVELS:
        raise ValueError("it is nested too deep")
    if type(data) is list:
        return Node("list", [_decode(item, depth + 1) for item in data])
    if type(data) is not dict:
        return Value(_decode_value(data))
    kind = data["$"]
    if kind == "array":
        if type(data["i"]) is not int or data["i"] < 0:
            raise ValueError("an array's number")
        return ArrayRef(data["i"])
    if kind not in CONTAINER_KINDS:
        return Value(_decode_value(data))
    keys: list[Any] | None = None
    if "named" in data:
        keys, items = list(data["named"]), list(data["named"].values())
    elif "pairs" in data:
        keys, items = [_decode_value(key) for key, _ in data["pairs"]], [item for _, item in data["pairs"]]
    else:
        items = data["items"]
    if type(items) is not list or (kind == "object" and len(items) != 1):
        raise ValueError(f"the children of a {kind}")
    for key in keys or ():
        _check_key(key)
    if kind in ("set", "frozenset") and keys is not None:
        raise ValueError("a set has no keys")
    extra = {key: _decode_note(value) for key, value in data["extra"].items()} if "extra" in data else None
    named_type = data.get("type")
    if named_type is not None and type(named_type) is not str:
        raise ValueError("a type's name")
    children = [_decode(item, depth + 1) for item in items]
    if kind in ("set", "frozenset") and not all(map(is_hashable, children)):
        raise ValueError("the members of a set")
    if kind == "deque" and not _is_length((extra or {}).get("maxlen")):
        raise ValueError("the length of a deque")
    return Node(kind, children, keys, named_type, extra)


def _check_key(key: Any) -> None:
    if type(key) is tuple:
        for part in key:
            _check_key(part)
    elif type(key) is int and key.bit_length() > MAX_KEY_BITS:
        raise ValueError("a key that is too large an int")
    hash(key)


def _is_length(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value < 2**63)


def _decode_note(data: Any) -> Any:
    if type(data) is list:
        return [_decode_note(item) for item in data]
    if type(data) is dict and data.get("$") == "dict":
        return {key: _decode_note(item) for key, item in data["named"].items()}
    return _decode_value(data)


def decode_metrics(data: Any) -> dict[str, float | int | None]:
    """A manifest's metrics. ``CorruptCheckpoint`` for anything that is not a number or None."""
    try:
        metrics = {key: _decode_value(value) for key, value in data.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"the manifest's metrics are not understood: {error!r}") from error
    if any(value is not None and type(value) not in (int, float) for value in metrics.values()):
        raise CorruptCheckpoint("the manifest's metrics are not all numbers")
    return metrics


class StoredEnum:
    """An enum member read without its class: the class's name, the member's name and its value."""

    __slots__ = ("name", "type_name", "value")

    def __init__(self, type_name: str, name: str | None, value: Any) -> None:
        self.type_name, self.name, self.value = type_name, name, value


def _decode_value(data: Any) -> Any:
    if data is None or type(data) in (bool, int, float, str):
        return data
    return _DECODERS[data["$"]](data)


def _decode_enum(data: dict[str, Any]) -> StoredEnum:
    if type(data["type"]) is not str or not isinstance(data["name"], str | None):
        raise ValueError("an enum's names")
    return StoredEnum(data["type"], data["name"], _decode_value(data["v"]))


def _decode_int(data: dict[str, Any]) -> int:
    text = data["v"]
    if not text.lstrip("-").startswith("0x"):
        raise ValueError("a big int is hexadecimal")
    return int(text, 16)


def _decode_float(data: dict[str, Any]) -> float:
    if data["v"] not in ("nan", "inf", "-inf"):
        raise ValueError("a float that JSON cannot hold is nan, inf or -inf")
    return float(data["v"])


def _decode_scalar(data: dict[str, Any]) -> np.generic:
    if not isinstance(data["dtype"], str) or not data["dtype"].replace("_", "").isalnum():
        raise ValueError("the dtype of a NumPy scalar")
    dtype = np.dtype(data["dtype"])
    raw = bytes.fromhex(data["v"])
    if dtype.hasobject or len(raw) != dtype.itemsize:
        raise ValueError(f"a NumPy scalar of {data['dtype']}")
    scalar: np.generic = np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype)[0]
    return scalar


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": _decode_int,
    "float": _decode_float,
    "str": lambda data: base64.b64decode(data["v"], validate=True).decode("utf-16-le", "surrogatepass"),
    "bytes": lambda data: base64.b64decode(data["v"], validate=True),
    "complex": lambda data: complex(_decode_value(data["v"][0]), _decode_value(data["v"][1])),
    "tuple": lambda data: tuple(_decode_value(item) for item in data["items"]),
    "enum": _decode_enum,
    "numpy": _decode_scalar,
    "path": lambda data: pathlib.Path(_decode_value(data["v"])),
}
