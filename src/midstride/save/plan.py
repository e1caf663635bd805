"""Which array goes to which file at which offset. Made once for a structure of state, then reused.

One data file for each top-level item of the state that has arrays; arrays that lie directly at the
top share one, and so do all where the items are many. An item's keys in its file are the state
dict's own names where its arrays lie directly under string keys, JSON pointers elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from midstride import limits
from midstride.adapters import ArrayLeaf
from midstride.format import layout
from midstride.format.datafile import build_header, sort_key
from midstride.tree import pointer


@dataclass(frozen=True, slots=True)
class Slot:
    """The bytes of one file that one array fills."""

    leaf: int
    key: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file: its first bytes, and the arrays that follow back to back."""

    name: str
    head: bytes
    slots: tuple[Slot, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a file that is staged and written as one; ``offset`` is a multiple of the chunk size."""

    file: int
    offset: int
    nbytes: int
    place: int
    """Where it is staged when the arena holds the whole plan: page-aligned, in order."""
    slots: tuple[int, int]
    """The slots of its file that it touches: first, and one past the last."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything goes."""

    arrays: tuple[tuple[str, tuple[int, ...], str], ...]
    """dtype, shape and library of each array."""
    files: tuple[FilePlan, ...]
    chunks: tuple[Chunk, ...]
    total_bytes: int
    """Bytes of all files together."""
    arena_bytes: int
    """Staging memory that holds the whole plan, every file from a page boundary."""


class Planner:
    """Makes plans, and keeps the last one for as long as the structure stays the same."""

    def __init__(self) -> None:
        self._signature: tuple[Any, ...] = ()
        self._last: Plan | None = None

    def plan(self, leaves: Sequence[ArrayLeaf], chunk_bytes: int) -> Plan:
        """The plan for these arrays. The same object as before while paths, dtypes and shapes are the same."""
        signature = (chunk_bytes, *[(leaf.path, leaf.dtype, leaf.shape, leaf.adapter.lib) for leaf in leaves])
        # 1, 1.0 and True are equal as keys but not the same key, so types count too.
        types = tuple(type(key) for leaf in leaves for key in leaf.path)
        if self._last is None or self._signature != (signature, types):
            files = tuple(_plan_files(leaves))
            chunks, arena_bytes = _cut(files, chunk_bytes)
            total = sum(file.size for file in files)
            arrays = tuple((leaf.dtype, leaf.shape, leaf.adapter.lib) for leaf in leaves)
            self._last = Plan(arrays, files, chunks, total, arena_bytes)
            self._signature = (signature, types)
        return self._last


def _plan_files(leaves: Sequence[ArrayLeaf]) -> Iterator[FilePlan]:
    stems: set[str] = set()
    for item, members in _items(leaves).items():
        stem = layout.file_stem(item[0] if item else "state", stems)
        stems.add(stem)
        yield from _item_files(stem, _named(leaves, members, len(item)), leaves)


def _items(leaves: Sequence[ArrayLeaf]) -> dict[tuple[Any, ...], list[int]]:
    """Item -> its leaves. The item ``()`` has the arrays that lie directly at the top."""
    items: dict[tuple[Any, ...], list[int]] = {}
    for number, leaf in enumerate(leaves):
        items.setdefault(leaf.path[:1] if len(leaf.path) > 1 else (), []).append(number)
    return items if len(items) <= limits.MAX_ITEM_FILES else {(): list(range(len(leaves)))}


def _named(leaves: Sequence[ArrayLeaf], members: list[int], depth: int) -> list[tuple[str, int]]:
    """A key for each leaf of an item, unique in it."""
    paths = [leaves[number].path[depth:] for number in members]
    own_names = all(len(path) == 1 and type(path[0]) is str for path in paths)
    taken: set[str] = set()
    named = []
    for path, number in zip(paths, members, strict=True):
        key = layout.unique_tensor_key(path[0] if own_names else pointer(path), taken)
        taken.add(key)
        named.append((key, number))
    return named


def _item_files(stem: str, named: list[tuple[str, int]], leaves: Sequence[ArrayLeaf]) -> Iterator[FilePlan]:
    shards = list(_split(sorted(named, key=lambda pair: sort_key(leaves[pair[1]].dtype)), leaves))
    names = [layout.data_file(stem, number, len(shards)) for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        # The word that PyTorch's users of safetensors put there, and that Hugging Face's loaders ask for.
        torch_made = any(leaves[number].adapter.lib == "torch" for _, number in shard)
        header = build_header(
            ((key, leaves[number].dtype, leaves[number].shape) for key, number in shard),
            {"format": "pt"} if torch_made else {},
        )
        slots = tuple(
            Slot(number, key, tensor.begin, tensor.end)
            for (key, number), tensor in zip(shard, header.tensors, strict=True)
        )
        yield FilePlan(name, header.raw, slots, header.size)
    if len(shards) > 1:
        yield _index(stem, names, shards, leaves)


def _split(named: list[tuple[str, int]], leaves: Sequence[ArrayLeaf]) -> Iterator[list[tuple[str, int]]]:
    shard: list[tuple[str, int]] = []
    data_bytes = header_bytes = 0
    for key, number in named:
        nbytes = leaves[number].nbytes
        # An entry is its key, escaped at worst sixfold, and some 100 characters of numbers.
        entry_bytes = 6 * len(key.encode()) + 120 + 20 * len(leaves[number].shape)
        full = data_bytes + nbytes > limits.SPLIT_BYTES or header_bytes + entry_bytes > limits.HEADER_LIMIT_BYTES
        if shard and full:
            yield shard
            shard, data_bytes, header_bytes = [], 0, 0
        shard.append((key, number))
        data_bytes += nbytes
        header_bytes += entry_bytes
    yield shard


def _index(stem: str, names: list[str], shards: list[list[tuple[str, int]]], leaves: Sequence[ArrayLeaf]) -> FilePlan:
    total = sum(leaves[number].nbytes for shard in shards for _, number in shard)
    where = {key: name for name, shard in zip(names, shards, strict=True) for key, _ in shard}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1).encode()
    return FilePlan(layout.index_file(stem), text, (), len(text))


def _cut(files: Sequence[FilePlan], chunk_bytes: int) -> tuple[tuple[Chunk, ...], int]:
    chunks: list[Chunk] = []
    place = 0
    for number, file in enumerate(files):
        first = 0
        for offset in range(0, file.size, chunk_bytes):
            end = min(offset + chunk_bytes, file.size)
            while first < len(file.slots) and file.slots[first].end <= offset:
                first += 1
            last = first
            while last < len(file.slots) and file.slots[last].begin < end:
                last += 1
            chunks.append(Chunk(number, offset, end - offset, place, (first, last)))
            place += -(-(end - offset) // limits.PAGE_BYTES) * limits.PAGE_BYTES
    return tuple(chunks), place
