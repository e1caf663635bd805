"""The manifest through its bytes: whole, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from midstride.errors import CorruptCheckpoint, NewerFormat
from midstride.format.manifest import (
    TAIL_BYTES,
    ArrayRecord,
    FileRecord,
    Manifest,
    Slice,
    decode_manifest,
    encode_manifest,
    slice_digest,
)
from midstride.limits import BLOCK_BYTES

_D = [f"{n:032x}" for n in range(4)]
_BLOCKS = (_D[1], _D[2])
_BIG = BLOCK_BYTES + 16

MANIFEST = Manifest(
    run="run",
    seq=3,
    parent=None,
    step=2**63 - 1,
    attempt="0123abcd",
    created="2026-01-01T00:00:00+00:00",
    versions={"python": "3.11"},
    world=1,
    metrics={"loss": 0.5, "é": None},
    tree={"$": "dict", "named": {"w": {"$": "array", "i": 0}, "é": "\x7f"}},
    arrays=(
        ArrayRecord("uint8", (_BIG,), "numpy", (Slice(0, "w", (0,), (_BIG,), 4096, 4096 + _BIG, slice_digest(_BLOCKS), _BLOCKS),)),
        ArrayRecord("float32", (), "torch", (Slice(1, "x", (), (), 4096, 4100, _D[3]),)),
        ArrayRecord("int8", (0, 2), "torch", (Slice(1, "y", (0, 0), (0, 2), 4100, 4100, _D[3]),)),
    ),
    files=(FileRecord("w.safetensors", 4096 + _BIG, 4096, _D[0]), FileRecord("x.safetensors", 4100, 4096, _D[1])),
)  # fmt: skip


def signed(text: str) -> bytes:
    """A document, whatever it says, with the digest that belongs to it."""
    body = text.rstrip()[:-1].encode() + b',\n"digest":"' + b"0" * 32 + b'"}\n'
    return body[:-35] + xxhash.xxh3_128_hexdigest(body).encode() + body[-3:]


def _document() -> dict[str, object]:
    data = json.loads(encode_manifest(MANIFEST))
    del data["digest"]
    return data


def test_there_and_back() -> None:
    raw = encode_manifest(MANIFEST)
    assert raw.isascii()
    assert decode_manifest(raw) == MANIFEST
    assert decode_manifest(encode_manifest(MANIFEST, json.dumps(MANIFEST.tree))) == MANIFEST
    assert decode_manifest(signed(json.dumps(_document()))) == MANIFEST
    info = MANIFEST.info("folder", {"loss": 0.5})
    assert (info.step, info.seq, info.parent, info.name, info.nbytes) == (2**63 - 1, 3, None, "folder", 8196 + _BIG)


def test_slices_of_an_array_that_several_processes_hold() -> None:
    parts = tuple(Slice(1, f"x{n}", (2 * n,), (2,), 4096 + 2 * n, 4098 + 2 * n, _D[n]) for n in range(2))
    whole = replace(MANIFEST, arrays=(ArrayRecord("int8", (4,), "numpy", parts),), tree=1)
    assert decode_manifest(encode_manifest(whole)) == whole
    for bad in (
        (parts[0], parts[0]),
        (parts[0], replace(parts[1], start=(1,))),
        (replace(parts[1], start=(3,)), parts[0]),
    ):
        with pytest.raises(CorruptCheckpoint):
            decode_manifest(encode_manifest(replace(whole, arrays=(ArrayRecord("int8", (4,), "numpy", bad),))))


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    raw = encode_manifest(MANIFEST)
    for position in range(len(raw)):
        harmed = bytearray(raw)
        harmed[position] ^= 1 << position % 8
        with pytest.raises(CorruptCheckpoint):
            decode_manifest(bytes(harmed))
        with pytest.raises(CorruptCheckpoint):
            decode_manifest(raw[:position])
    for other in (raw + b"\n", b" " + raw, raw * 2, raw[:-TAIL_BYTES], b"\0" * len(raw)):
        with pytest.raises(CorruptCheckpoint):
            decode_manifest(other)


def test_a_newer_format_says_so() -> None:
    with pytest.raises(NewerFormat, match="format 2.*up to 1: upgrade"):
        decode_manifest(signed(json.dumps({"format": 2, "whatever": []})))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
anything = st.recursive(
    scalars, lambda x: st.lists(x, max_size=2) | st.dictionaries(st.text(max_size=2), x, max_size=2)
)


@given(st.data())
def test_any_change_that_is_signed_is_a_manifest_or_a_typed_error(data: st.DataObject) -> None:
    document = _document()
    place: object = document
    while True:
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))  # type: ignore[arg-type, type-var]
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):  # type: ignore[index]
            place = place[key]  # type: ignore[index]
            continue
        place[key] = data.draw(anything)  # type: ignore[index]
        break
    try:
        decode_manifest(signed(json.dumps(document)))
    except (CorruptCheckpoint, NewerFormat):
        pass
