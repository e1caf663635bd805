"""Whatever a data file's header, its sizes or a manifest say, the answer is a typed error: no crash, no
memory taken because a number said so, nothing handed out. Digests do not help here: whoever made the file
has made them right.

Every case is loaded, restored into live objects and verified, with a limit on the memory that this takes.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from states import save

import midstride as ms

pytestmark = pytest.mark.timeout(30)

_MEMORY_BYTES = 50 * 2**20
_GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]},
}


def _run(path: Path) -> tuple[Path, dict[str, Any]]:
    """A run with one good checkpoint: its step folder and its manifest."""
    info = save(path, {"m": {"a": np.ones((2, 3), np.float32), "b": np.arange(4, dtype=np.uint8)}, "n": 1})
    folder = path / info.name
    return folder, json.loads((folder / "manifest.json").read_bytes())


def _sign(folder: Path, manifest: dict[str, Any] | str) -> None:
    """Write a manifest, whatever it says, with the digest that belongs to it."""
    if not isinstance(manifest, str):
        manifest = json.dumps({key: value for key, value in manifest.items() if key != "digest"})
    body = manifest[:-1].encode() + b',\n"digest":"' + b"0" * 32 + b'"}\n'
    (folder / "manifest.json").write_bytes(body[:-35] + xxhash.xxh3_128_hexdigest(body).encode() + body[-3:])


def _refused(path: Path, match: str | None = None) -> None:
    """All ways in say so, in little memory, and touch nothing."""
    live = torch.nn.Linear(3, 2)
    before = live.weight.clone()
    template = {"m": {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.uint8)}, "n": 0}
    tracemalloc.start()
    try:
        with pytest.raises(ms.RestoreError, match=match):
            ms.open(path).load()
        with ms.Checkpointer(path) as ckpt:
            for wanted in (template, {"m": live, "n": 0}, None):
                with pytest.raises(ms.RestoreError):
                    ckpt.restore(wanted)
        assert all(problems for problems in ms.open(path).verify().values())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < _MEMORY_BYTES, f"{peak} bytes"
    assert torch.equal(live.weight, before)
    assert not template["m"]["a"].any() and template["n"] == 0


# The data file. Its maker has put its size and the digest of its header into the manifest.


def _entry(**changes: Any) -> str:
    return json.dumps({**_GOOD, "a": {**_GOOD["a"], **changes}})


_HEADERS: dict[str, str | bytes] = {
    "no JSON": "{",
    "not an object": "[]",
    "a number": "1",
    "empty": "",
    "not UTF-8": b'{"\xff": 1}',
    "key twice": json.dumps(_GOOD)[:-1] + ',"a":' + json.dumps(_GOOD["a"]) + "}",
    "field twice": json.dumps(_GOOD).replace('"dtype": "F32"', '"dtype": "F32", "dtype": "F32"'),
    "begin after end": _entry(data_offsets=[24, 0]),
    "overlap": json.dumps({**_GOOD, "b": {**_GOOD["b"], "data_offsets": [20, 24]}}),
    "hole": json.dumps({**_GOOD, "b": {**_GOOD["b"], "data_offsets": [25, 29]}}),
    "hole in front": _entry(data_offsets=[1, 25]),
    "product overflows": _entry(shape=[2**40, 2**40]),
    "product overflows to the right size": _entry(shape=[2**63, 2, 6]),
    "many dimensions": _entry(shape=[2] * 100_000),
    "negative": _entry(shape=[-2, -3]),
    "floats": _entry(shape=[2.0, 3.0]),
    "bools": _entry(shape=[True, 6]),
    "texts": _entry(shape=["2", "3"]),
    "a text for a shape": _entry(shape="23"),
    "unknown dtype": _entry(dtype="F99"),
    "a list for a dtype": _entry(dtype=["F32"]),
    "wrong dtype": _entry(dtype="F64"),
    "another dtype of this size": _entry(dtype="I32"),
    "another shape": _entry(shape=[3, 2]),
    "three offsets": _entry(data_offsets=[0, 24, 24]),
    "float offsets": _entry(data_offsets=[0.0, 24.0]),
    "huge offsets": _entry(data_offsets=[0, 2**70]),
    "NaN": _entry(data_offsets=[0, float("nan")]),
    "infinity": json.dumps(_GOOD).replace("24]", "1e999]", 1),
    "huge int": json.dumps(_GOOD).replace("24]", "9" * 4000 + "]", 1),
    "far too huge int": json.dumps(_GOOD).replace("24]", "9" * 100_000 + "]", 1),
    "entry is null": json.dumps({**_GOOD, "a": None}),
    "no entry": json.dumps({"b": {"dtype": "U8", "shape": [28], "data_offsets": [0, 28]}}),
    "one more": json.dumps({**_GOOD, "c": {"dtype": "U8", "shape": [0], "data_offsets": [28, 28]}}),
    "deep": "[" * 100_000,
    "deep and closed": '{"a":' * 100_000 + "1" + "}" * 100_000,
}


def _put_header(folder: Path, manifest: dict[str, Any], raw: bytes, size: int | None = None) -> None:
    """Replace the data file's header, and let the manifest agree where it can."""
    data = (folder / "m.safetensors").read_bytes()[manifest["files"][0]["header_bytes"] :]
    (folder / "m.safetensors").write_bytes(raw + data)
    record = manifest["files"][0]
    moved = len(raw) - record["header_bytes"]
    record.update(size=len(raw + data), header_bytes=len(raw), header_digest=xxhash.xxh3_128_hexdigest(raw))
    for array in manifest["arrays"]:
        for part in array["slices"]:
            part["bytes"] = [n + moved for n in part["bytes"]]
    _sign(folder, manifest)


@pytest.mark.parametrize("case", _HEADERS)
def test_headers(tmp_path: Path, case: str) -> None:
    folder, manifest = _run(tmp_path)
    text = _HEADERS[case]
    body = text if isinstance(text, bytes) else text.encode()
    _put_header(folder, manifest, struct.pack("<Q", len(body)) + body)
    _refused(tmp_path, r"m\.safetensors")


def test_the_same_header_unharmed(tmp_path: Path) -> None:
    """The tests above fail for what they say, and not for how they say it."""
    folder, manifest = _run(tmp_path)
    body = json.dumps(_GOOD).encode()
    _put_header(folder, manifest, struct.pack("<Q", len(body)) + body)
    assert ms.open(tmp_path).load()["m"]["b"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 2**31, 100 * 10**6 + 1, 4089, 4087])
def test_header_lengths(tmp_path: Path, length: int) -> None:
    folder, manifest = _run(tmp_path)
    raw = (folder / "m.safetensors").read_bytes()[: manifest["files"][0]["header_bytes"]]
    _put_header(folder, manifest, struct.pack("<Q", length) + raw[8:])
    _refused(tmp_path, r"m\.safetensors")


@pytest.mark.parametrize("change", ["trailing byte", "short", "shorter than the length", "empty"])
def test_sizes(tmp_path: Path, change: str) -> None:
    folder, manifest = _run(tmp_path)
    data = folder / "m.safetensors"
    raw = data.read_bytes()
    raw = {"trailing byte": raw + b"\0", "short": raw[:-1], "shorter than the length": raw[:7], "empty": b""}[change]
    data.write_bytes(raw)
    _refused(tmp_path)
    manifest["files"][0]["size"] = len(raw)  # and with a manifest that agrees
    _sign(folder, manifest)
    _refused(tmp_path)


@pytest.mark.parametrize("nbytes", [2**31, 90 * 10**6])
def test_a_header_as_long_as_a_sparse_file(tmp_path: Path, nbytes: int) -> None:
    folder, manifest = _run(tmp_path)
    with open(folder / "m.safetensors", "r+b") as file:
        file.write(struct.pack("<Q", nbytes - 8))
        file.truncate(nbytes)
    manifest["files"][0].update(size=nbytes, header_bytes=nbytes)
    for array in manifest["arrays"]:
        array["slices"][0]["bytes"] = [0, 0]
    _sign(folder, manifest)
    _refused(tmp_path)


# The manifest.


def _edited(*path: Any, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def edit(manifest: dict[str, Any]) -> dict[str, Any]:
        place: Any = manifest
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return manifest

    return edit


_ARRAY = ("arrays", 0)
_SLICE = (*_ARRAY, "slices", 0)
_MANIFESTS: dict[str, Callable[[dict[str, Any]], dict[str, Any] | str]] = {
    "not an object": lambda m: "[1]",
    "deep": lambda m: json.dumps(m)[:-1] + ',"x":' + "[" * 100_000 + "]" * 100_000 + "}",
    "deep tree": _edited("tree", value=None),  # replaced below
    "NaN": lambda m: json.dumps(m).replace('"seq": 1', '"seq": NaN'),
    "infinity": lambda m: json.dumps(m).replace('"seq": 1', '"seq": -Infinity'),
    "huge int": lambda m: json.dumps(m).replace('"seq": 1', '"seq": ' + "9" * 4000),
    "far too huge int": lambda m: json.dumps(m).replace('"seq": 1', '"seq": ' + "9" * 1_000_000),
    "key twice": lambda m: json.dumps(m)[:-1] + ',"seq":1}',
    "missing field": lambda m: {key: value for key, value in m.items() if key != "files"},
    "float seq": _edited("seq", value=1.0),
    "negative seq": _edited("seq", value=-1),
    "bool step": _edited("step", value=True),
    "huge step": _edited("step", value=2**63),
    "format 0": _edited("format", value=0),
    "text format": _edited("format", value="1"),
    "list of metrics": _edited("metrics", value=[1]),
    "nested metric": _edited("metrics", value={"x": {"$": "tuple", "items": []}}),
    "file that leaves": _edited("files", 0, "name", value="../m.safetensors"),
    "file twice": lambda m: {**m, "files": m["files"] * 2},
    "file number": _edited(*_SLICE, "file", value=1),
    "negative file number": _edited(*_SLICE, "file", value=-1),
    "header past the end": _edited("files", 0, "header_bytes", value=2**40),
    "huge size": _edited("files", 0, "size", value=2**62),
    "shape that overflows": _edited(*_ARRAY, "shape", value=[2**40, 2**40]),
    "shape of 0 by much": _edited(*_ARRAY, "shape", value=[0, 2**62, 2**62]),
    "negative shape": _edited(*_ARRAY, "shape", value=[-2, -3]),
    "float shape": _edited(*_ARRAY, "shape", value=[2.0, 3.0]),
    "many dimensions": _edited(*_ARRAY, "shape", value=[1] * 1000),
    "range in the header": _edited(*_SLICE, "bytes", value=[0, 24]),
    "range past the end": _edited(*_SLICE, "bytes", value=[2**40, 2**40 + 24]),
    "no slices": _edited(*_ARRAY, "slices", value=[]),
    "slices twice": lambda m: _edited(*_ARRAY, "slices", value=m["arrays"][0]["slices"] * 2)(m),
    "digest of blocks": _edited(*_SLICE, "blocks", value=["0" * 32]),
    "unknown dtype": _edited(*_ARRAY, "dtype", value="float99"),
    "list for a dtype": _edited(*_ARRAY, "dtype", value=["float32"]),
    "array that is not there": _edited("tree", value={"$": "array", "i": 5}),
    "negative array": _edited("tree", value={"$": "array", "i": -1}),
    "bool array": _edited("tree", value={"$": "array", "i": True}),
    "unknown kind": _edited("tree", value={"$": "code", "v": "1"}),
    "no kind": _edited("tree", value={}),
    "list for a kind": _edited("tree", value={"$": []}),
    "unhashable key": _edited("tree", value={"$": "dict", "pairs": [[{"$": "numpy", "dtype": "f4", "v": []}, 1]]}),
    "object dtype": _edited("tree", value={"$": "numpy", "dtype": "O", "v": "00" * 8}),
    "huge dtype": _edited("tree", value={"$": "numpy", "dtype": "(100000,100000)f8", "v": ""}),
    "decimal digits": _edited("tree", value={"$": "int", "v": "9" * 100_000}),
    "two children": _edited("tree", value={"$": "object", "items": [1, 2], "extra": {}}),
    "odd factory": _edited("tree", value={"$": "defaultdict", "named": [], "extra": {"factory": "eval"}}),
}
_MANIFESTS["deep tree"] = _edited("tree", value=json.loads("[" * 400 + "]" * 400))


@pytest.mark.parametrize("case", _MANIFESTS)
def test_manifests(tmp_path: Path, case: str) -> None:
    folder, manifest = _run(tmp_path)
    _sign(folder, _MANIFESTS[case](manifest))
    _refused(tmp_path)


def test_an_unharmed_manifest_signed_again(tmp_path: Path) -> None:
    folder, manifest = _run(tmp_path)
    _sign(folder, manifest)
    assert ms.open(tmp_path).load()["n"] == 1


@pytest.mark.parametrize("nbytes", [0, 1, 44, 45, 46, 900 * 10**6, 2 * 10**9])
@pytest.mark.parametrize("content", ["zeros", "spaces"])
def test_a_manifest_of_nothing(tmp_path: Path, nbytes: int, content: str) -> None:
    folder, _ = _run(tmp_path)
    with open(folder / "manifest.json", "wb") as file:
        if content == "spaces":  # as far as anybody looks
            file.truncate(max(0, nbytes - 2**20))
            file.seek(0, 2)
            file.write(b" " * min(nbytes, 2**20))
        file.truncate(nbytes)
    _refused(tmp_path)


def test_a_factory_is_only_a_name(tmp_path: Path) -> None:
    folder, manifest = _run(tmp_path)
    for name in ("eval", "os.system", "__import__", 5, None):
        manifest["tree"] = {"$": "defaultdict", "named": {}, "extra": {"factory": name}, "type": "os:system"}
        manifest["arrays"], manifest["files"] = [], []
        _sign(folder, manifest)
        assert ms.open(tmp_path).load().default_factory is None
