"""Fill the arena with the files' bytes, in order, and hand over each chunk when it is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from midstride.adapters import ArrayLeaf
from midstride.save.arena import Arena
from midstride.save.plan import Chunk, FilePlan, Plan

Deliver = Callable[[int, int], None]
"""Called with a chunk's number and the place in the arena where its bytes are."""


@dataclass(slots=True)
class _Batch:
    """Leaves of one adapter, and the views of the arena that they are copied into."""

    leaves: list[int]
    views: list[Any]


class Stager:
    """Copies leaves into one arena. Views into it are made once for a plan and reused."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._plan: Plan | None = None
        self._batches: list[_Batch] = []

    def stage_whole(self, plan: Plan, leaves: Sequence[ArrayLeaf], deliver: Deliver) -> None:
        """Stage a plan that fits the arena: no chunk waits for another.

        The chunks are handed over when all are full: a writer that began earlier would take the cores
        and the memory's bandwidth from the copy, which is what training waits for.
        """
        if self._plan is not plan:
            self._batches = _batches(plan, leaves, self._arena.bytes)
            self._plan = plan
        for base, file in zip(_bases(plan), plan.files, strict=True):
            _put(self._arena.bytes, base, file.head)
        for batch in self._batches:
            copy = leaves[batch.leaves[0]].adapter.copy
            copy([leaves[number] for number in batch.leaves], batch.views)
        for number, chunk in enumerate(plan.chunks):
            deliver(number, chunk.place)

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
    """One for each adapter: so each copies all of its arrays in one call. Arrays without elements are left out."""
    batches: dict[int, _Batch] = {}
    for base, file in zip(_bases(plan), plan.files, strict=True):
        for slot in file.slots:
            if slot.end > slot.begin:
                leaf = leaves[slot.leaf]
                batch = batches.setdefault(id(leaf.adapter), _Batch([], []))
                batch.leaves.append(slot.leaf)
                batch.views.append(leaf.adapter.view(leaf, arena[base + slot.begin : base + slot.end]))
    return list(batches.values())


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
