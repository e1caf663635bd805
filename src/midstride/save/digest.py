"""Digests of a save's arrays, computed as their bytes pass by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from midstride.format.manifest import slice_digest
from midstride.limits import BLOCK_BYTES
from midstride.save.plan import Chunk, FilePlan


class Digester:
    """Takes the chunks of all files in order and keeps a digest for each 16 MiB block of each array."""

    def __init__(self, files: Sequence[FilePlan]) -> None:
        self._files = files
        self._blocks: list[list[list[str]]] = [[[] for _ in file.slots] for file in files]
        self._open: xxhash.xxh3_128 | None = None  # the block that the last chunk ended in

    def update(self, chunk: Chunk, data: np.ndarray) -> None:
        """Digest one chunk's bytes."""
        view = data.data
        chunk_end = chunk.offset + chunk.nbytes
        slots = self._files[chunk.file].slots
        for number in range(*chunk.slots):
            slot = slots[number]
            blocks = self._blocks[chunk.file][number]
            position = max(slot.begin, chunk.offset)
            stop = min(slot.end, chunk_end)
            while position < stop:
                block_end = min(slot.end, slot.begin + ((position - slot.begin) // BLOCK_BYTES + 1) * BLOCK_BYTES)
                end = min(stop, block_end)
                piece = view[position - chunk.offset : end - chunk.offset]
                self._take(piece, blocks, ended=end == block_end)
                position = end

    def _take(self, piece: memoryview, blocks: list[str], *, ended: bool) -> None:
        if ended and self._open is None:
            blocks.append(xxhash.xxh3_128_hexdigest(piece))
            return
        if self._open is None:
            self._open = xxhash.xxh3_128()
        self._open.update(piece)
        if ended:
            blocks.append(self._open.hexdigest())
            self._open = None

    def of_slot(self, file: int, slot: int) -> tuple[str, tuple[str, ...]]:
        """An array's own digest, and those of its blocks where it has several."""
        blocks = self._blocks[file][slot]
        if not blocks:
            return xxhash.xxh3_128_hexdigest(b""), ()
        return (blocks[0], ()) if len(blocks) == 1 else (slice_digest(blocks), tuple(blocks))
