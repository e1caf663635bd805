"""Fill the arena with the files' bytes, in order, and hand over each chunk when it is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from midstride.save.arena import Arena
from midstride.save.plan import Chunk, FilePlan, Plan
from midstride.state import ArrayAdapter, ArrayLeaf

_BATCH_BYTES = 64 * 2**20
"""Copied by one call before the chunks it filled are handed over: large enough that the calls do not
count, small enough that the writer starts early."""

Deliver = Callable[[int, int], None]
"""Called with a chunk's number and the place in the arena where its bytes are."""


@dataclass(slots=True)
class _Batch:
    """Leaves of one adapter, and the views of the arena that they are copied into."""

    adapter: ArrayAdapter
    leaves: list[int]
    views: list[Any]
    chunks_full: int
    """Chunks that are full when this batch and those before it are copied."""


class Stager:
    """Copies leaves into one arena. Views into it are made once for a plan and reused."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._plan: Plan | None = None
        self._batches: list[_Batch] = []

    def stage_whole(self, plan: Plan, leaves: Sequence[ArrayLeaf], deliver: Deliver) -> None:
        """Stage a plan that fits the arena: no chunk waits for another."""
        if self._plan is not plan:
            self._batches = list(_batches(plan, leaves, self._arena.bytes))
            self._plan = plan
        bases = _bases(plan)
        for base, file in zip(bases, plan.files, strict=True):
            _put(self._arena.bytes, base, file.head)
        delivered = 0
        for batch in self._batches:
            if batch.leaves:  # none where all of them are empty
                batch.adapter.copy([leaves[number] for number in batch.leaves], batch.views)
            for number in range(delivered, batch.chunks_full):
                deliver(number, plan.chunks[number].place)
            delivered = max(delivered, batch.chunks_full)
        for number in range(delivered, len(plan.chunks)):
            deliver(number, plan.chunks[number].place)

    def stage_through(
        self, plan: Plan, leaves: Sequence[ArrayLeaf], free_place: Callable[[], int], deliver: Deliver
    ) -> None:
        """Stage a plan larger than the arena: each chunk waits for a place that the writer has emptied."""
        self._plan, self._batches = None, []
        for number, chunk in enumerate(plan.chunks):
            place = free_place()
            _fill_chunk(self._arena.bytes[place : place + chunk.nbytes], chunk, plan.files[chunk.file], leaves)
            deliver(number, place)


def _bases(plan: Plan) -> list[int]:
    bases = [0] * len(plan.files)
    for chunk in plan.chunks:
        if chunk.offset == 0:
            bases[chunk.file] = chunk.place
    return bases


def _put(target: np.ndarray, place: int, data: bytes) -> None:
    target[place : place + len(data)] = np.frombuffer(data, np.uint8)


def _batches(plan: Plan, leaves: Sequence[ArrayLeaf], arena: np.ndarray) -> list[_Batch]:
    batches: list[_Batch] = []
    batch: _Batch | None = None
    size = 0
    for number, (base, file) in enumerate(zip(_bases(plan), plan.files, strict=True)):
        for slot in file.slots:
            leaf = leaves[slot.leaf]
            if batch is None or batch.adapter is not leaf.adapter or size >= _BATCH_BYTES:
                batch, size = _Batch(leaf.adapter, [], [], 0), 0
                batches.append(batch)
            if slot.end > slot.begin:
                batch.leaves.append(slot.leaf)
                batch.views.append(leaf.adapter.view(leaf, arena[base + slot.begin : base + slot.end]))
                size += slot.end - slot.begin
            batch.chunks_full = _chunks_full(plan, number, slot.end, batch.chunks_full)
    return batches


def _chunks_full(plan: Plan, file: int, position: int, at_least: int) -> int:
    """How many chunks are full when ``file`` is staged up to byte ``position``."""
    number = at_least
    while number < len(plan.chunks):
        chunk = plan.chunks[number]
        if (chunk.file, chunk.offset + chunk.nbytes) > (file, position):
            break
        number += 1
    return number


def _fill_chunk(out: np.ndarray, chunk: Chunk, file: FilePlan, leaves: Sequence[ArrayLeaf]) -> None:
    end = chunk.offset + chunk.nbytes
    if chunk.offset < len(file.head):
        _put(out, 0, file.head[chunk.offset : end])
    for slot in file.slots[chunk.slots[0] : chunk.slots[1]]:
        begin, last = max(slot.begin, chunk.offset), min(slot.end, end)
        if begin >= last:
            continue
        leaf = leaves[slot.leaf]
        item = leaf.nbytes // max(1, _count(leaf.shape))
        first_item, last_item = (begin - slot.begin) // item, (last - slot.begin) // item
        leaf.adapter.copy_part(leaf, first_item, last_item, out[begin - chunk.offset : last - chunk.offset])


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
