"""The manifest: one JSON document that names every byte of a checkpoint. Its existence is the commit.

docs/format.md describes each field. The document ends with its own digest: XXH3-128 of its raw
bytes, the 32 characters of the digest taken as zeros.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import xxhash

from midstride.dtypes import DTYPES, array_nbytes
from midstride.errors import CorruptCheckpoint, NewerFormat
from midstride.format.layout import INDEX_SUFFIX, MAX_STEP, is_data_file
from midstride.info import CheckpointInfo
from midstride.limits import BLOCK_BYTES, HEADER_LIMIT_BYTES

FORMAT = 1
MAX_SEQ = 2**63 - 1
MAX_SLICES = 4096
"""Of one array: more than the processes of a job that share one."""
_ZEROS = "0" * 32
_TAIL = b'"digest":"' + _ZEROS.encode() + b'"}\n'
TAIL_BYTES = len(_TAIL)


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a global array, and the bytes of one data file that hold it, packed in C order."""

    file: int
    """Index into ``Manifest.files``."""
    key: str
    """Its key in that file's safetensors header."""
    start: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    end: int
    """Byte offsets from the start of the file."""
    digest: str
    """XXH3-128 of the bytes; of a slice over 16 MiB, of its blocks' digests (see ``slice_digest``)."""
    blocks: tuple[str, ...] = ()
    """A digest for each 16 MiB, the last one shorter; empty for a slice of one block."""


@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """One array of the state."""

    dtype: str
    shape: tuple[int, ...]
    lib: str
    """The library whose array it was ("numpy", "torch")."""
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file beside the manifest."""

    name: str
    size: int
    header_bytes: int
    """Bytes before the data of a data file; the whole size for an index file."""
    header_digest: str
    """XXH3-128 of those bytes."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's manifest."""

    run: str
    seq: int
    parent: int | None
    step: int
    attempt: str
    created: str
    versions: Mapping[str, str]
    world: int
    metrics: Mapping[str, Any]
    """Values as ``values.encode_value`` makes them."""
    tree: Any
    """As ``values.encode_tree`` makes it."""
    arrays: tuple[ArrayRecord, ...]
    files: tuple[FileRecord, ...]

    def info(self, folder: str, metrics: Mapping[str, float | int | None]) -> CheckpointInfo:
        """What people are told of this checkpoint."""
        nbytes = sum(file.size for file in self.files)
        return CheckpointInfo(self.step, self.seq, self.parent, self.run, folder, self.created, metrics, nbytes)


def slice_digest(blocks: Iterable[str]) -> str:
    """The digest of a slice of several blocks: XXH3-128 of their digests as bytes, in order."""
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(block) for block in blocks))


def encode_manifest(manifest: Manifest, tree_json: str | None = None) -> bytes:
    """The manifest as the bytes of its file. ``tree_json`` is ``manifest.tree`` where it is text already."""
    raw = "".join(_document(manifest, tree_json or _dumps(manifest.tree))).encode("ascii")
    body = raw + _TAIL
    digest = xxhash.xxh3_128_hexdigest(body)
    return body[: -len(_TAIL)] + _TAIL.replace(_ZEROS.encode(), digest.encode())


def _document(m: Manifest, tree_json: str) -> Iterator[str]:
    # Pieces rather than one dumps(): a state of many thousand arrays must not hold the interpreter
    # lock for the whole of it.
    head = {
        "format": FORMAT, "run": m.run, "seq": m.seq, "parent": m.parent, "step": m.step,
        "attempt": m.attempt, "created": m.created, "versions": dict(m.versions),
        "world": {"size": m.world}, "metrics": dict(m.metrics),
        "files": [
            {"name": f.name, "size": f.size, "header_bytes": f.header_bytes, "header_digest": f.header_digest}
            for f in m.files
        ],
    }  # fmt: skip
    yield _dumps(head)[:-1]
    yield ',\n"tree":'
    yield tree_json
    yield ',\n"arrays":['
    for number, array in enumerate(m.arrays):
        yield ",\n" if number else "\n"
        yield _dumps(
            {
                "dtype": array.dtype,
                "shape": array.shape,
                "lib": array.lib,
                "slices": [_slice_json(part) for part in array.slices],
            }
        )
    yield "],\n"


def _slice_json(part: Slice) -> dict[str, Any]:
    data: dict[str, Any] = {
        "file": part.file,
        "key": part.key,
        "start": part.start,
        "shape": part.shape,
        "bytes": [part.begin, part.end],
        "digest": part.digest,
    }
    if part.blocks:
        data["blocks"] = part.blocks
    return data


def _dumps(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def check_tail(tail: bytes) -> bytes:
    """The digest in a manifest's last ``TAIL_BYTES`` bytes. ``CorruptCheckpoint`` if they are not a manifest's."""
    if len(tail) < TAIL_BYTES or not (tail.startswith(b'"digest":"') and tail.endswith(b'"}\n')):
        raise CorruptCheckpoint("the manifest is cut off")
    return tail[10:42]


def decode_manifest(raw: bytes) -> Manifest:
    """Read a manifest and check it whole: its digest, its types, and that every range lies in its file.

    Raises ``CorruptCheckpoint``, or ``NewerFormat``, whatever the bytes are.
    """
    claimed = check_tail(raw[-TAIL_BYTES:])
    if claimed != xxhash.xxh3_128_hexdigest(raw[:-TAIL_BYTES] + _TAIL).encode():
        raise CorruptCheckpoint("the manifest's own digest does not match its bytes")
    try:
        data = json.loads(raw.decode("ascii"), parse_constant=_refuse_constant, object_pairs_hook=_no_duplicates)
        if type(data["format"]) is int and data["format"] > FORMAT:
            raise NewerFormat(
                f"the checkpoint has format {data['format']}, this Midstride reads up to {FORMAT}: upgrade to read it"
            )
        return _manifest(data)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptCheckpoint(f"the manifest is not understood: {error!r}") from error


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _manifest(data: Mapping[str, Any]) -> Manifest:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}")
    files = tuple(_file(item) for item in _list(data["files"]))
    if len({file.name for file in files}) != len(files):
        raise ValueError("two files of one name")
    return Manifest(
        run=_text(data["run"]),
        seq=_count(data["seq"]),
        parent=None if data["parent"] is None else _count(data["parent"]),
        step=_count(data["step"], MAX_STEP),
        attempt=_text(data["attempt"]),
        created=_text(data["created"]),
        versions={_text(key): _text(value) for key, value in data["versions"].items()},
        world=_count(data["world"]["size"]),
        metrics=dict(data["metrics"].items()),
        tree=data["tree"],
        arrays=tuple(_array(item, files) for item in _list(data["arrays"])),
        files=files,
    )


def _file(data: Mapping[str, Any]) -> FileRecord:
    name, size, header = _text(data["name"]), _count(data["size"]), _count(data["header_bytes"])
    if not is_data_file(name):
        raise ValueError(f"a file named {name!r}")
    if header > size:
        raise ValueError(f"the header of {name} is longer than the file")
    if header - 8 > HEADER_LIMIT_BYTES and not name.endswith(INDEX_SUFFIX):
        raise ValueError(f"the header of {name} has {header} bytes")
    return FileRecord(name, size, header, _digest(data["header_digest"]))


def _array(data: Mapping[str, Any], files: tuple[FileRecord, ...]) -> ArrayRecord:
    dtype, shape = data["dtype"], _shape(data["shape"])
    if dtype not in DTYPES:
        raise NewerFormat(f"the checkpoint has an array of dtype {dtype!r}, which this Midstride does not know")
    slices = tuple(_slice(item, dtype, shape, files) for item in _list(data["slices"]))
    # Boxes that are inside the array and do not overlap cover it when their sizes add up. With one
    # process there is one box, the array itself.
    if sum(math.prod(part.shape) for part in slices) != math.prod(shape):
        raise ValueError("the slices do not cover their array")
    if len(slices) > 1 and (len(slices) > MAX_SLICES or not all(math.prod(part.shape) for part in slices)):
        raise ValueError("slices that are empty, or too many")
    if any(_overlap(a, b) for number, a in enumerate(slices) for b in slices[:number]):
        raise ValueError("two slices hold the same elements")
    return ArrayRecord(dtype, shape, _text(data["lib"]), slices)


def _slice(data: Mapping[str, Any], dtype: str, whole: tuple[int, ...], files: tuple[FileRecord, ...]) -> Slice:
    start, shape = _shape(data["start"]), _shape(data["shape"])
    number, (begin, end) = _count(data["file"], len(files) - 1), data["bytes"]
    begin, end = _count(begin), _count(end, files[number].size)
    if len(start) != len(whole) or any(a + n > size for a, n, size in zip(start, shape, whole, strict=True)):
        raise ValueError("a slice that leaves its array")
    if begin < files[number].header_bytes or end - begin != array_nbytes(dtype, shape):
        raise ValueError("a slice whose bytes do not fit its shape")
    blocks = tuple(_digest(block) for block in data.get("blocks", ()))
    count = -(-(end - begin) // BLOCK_BYTES)
    if len(blocks) != (count if count > 1 else 0):
        raise ValueError("a slice with a wrong number of block digests")
    digest = _digest(data["digest"])
    if blocks and slice_digest(blocks) != digest:
        raise ValueError("a slice whose digest is not that of its blocks")
    return Slice(number, _text(data["key"]), start, shape, begin, end, digest, blocks)


def _overlap(a: Slice, b: Slice) -> bool:
    sides = zip(a.start, a.shape, b.start, b.shape, strict=True)
    return all(p < q + m and q < p + n for p, n, q, m in sides)


def _count(value: Any, limit: int = MAX_SEQ) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{str(value)[:40]} is not a count up to {limit}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{str(value)[:40]} is not text")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{str(value)[:40]} is not a list")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if len(_list(value)) > 64:
        raise ValueError("more than 64 dimensions")
    return tuple(_count(n) for n in value)


def _digest(value: Any) -> str:
    text = _text(value)
    if len(text) != 32 or text.strip("0123456789abcdef"):
        raise ValueError(f"{text[:40]!r} is not a digest")
    return text
