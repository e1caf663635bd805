"""Verified reads, in parallel. There is no other way to get at a checkpoint's bytes.

A *want* says which bytes of which array go into which buffer. Reading whole arrays goes straight
into their buffers; every block is checked against its digest before anybody is told that it is there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from midstride import limits
from midstride.dtypes import DTYPES
from midstride.errors import CorruptCheckpoint, Deadline, Gone, NotFound, Unavailable
from midstride.format import layout
from midstride.format.datafile import header_nbytes, parse_header
from midstride.format.manifest import FileRecord, Manifest, Slice
from midstride.format.values import decode_tree
from midstride.limits import BLOCK_BYTES, CHUNK_BYTES
from midstride.restore.catalog import check_sizes
from midstride.storage.base import ReadableFile, ReadableStorage
from midstride.tree import named_leaves, pointer
from midstride.waiting import SupervisedThread, room_for_threads, wait_for

_SMALL_BYTES = 2**20
"""Up to here, reading with neighbours and copying costs less than a read of its own."""


@dataclass(slots=True)
class Want:
    """Bytes ``first`` to ``last`` of array number ``array``, packed in C order, for ``buffer``."""

    array: int
    buffer: np.ndarray
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Block:
    """A digested range of a file, and where its wanted part goes."""

    file: int
    begin: int
    end: int
    digest: str
    array: int
    target: np.ndarray | None
    """None: only to be checked."""
    target_begin: int
    """The file offset that the target's first byte stands for."""


class CheckpointReader:
    """One checkpoint, open for reading. A context manager."""

    def __init__(self, storage: ReadableStorage, folder: str, manifest: Manifest) -> None:
        self.manifest = manifest
        self._storage = storage
        self._folder = folder
        self._files: dict[int, ReadableFile] = {}
        self._problems: list[str] | None = None
        self.tree = decode_tree(manifest.tree)
        self.names: dict[int, str] = {}
        for path, index in named_leaves(self.tree):
            if index >= len(manifest.arrays):
                raise CorruptCheckpoint(f"{self._where()}: {pointer(path)} is array {index}, which is not there")
            self.names.setdefault(index, pointer(path) or "/")

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def check_headers(self, arrays: Sequence[int] | None = None) -> None:
        """Check sizes and headers of the files that hold these arrays (None: of all files).

        Nothing is put anywhere before this has passed.
        """
        try:
            check_sizes(self._storage, self._folder, self.manifest)
        except NotFound as error:
            raise self._gone() from error
        wanted = range(len(self.manifest.arrays)) if arrays is None else arrays
        numbers = {part.file for index in wanted for part in self.manifest.arrays[index].slices}
        for number in range(len(self.manifest.files)) if arrays is None else sorted(numbers):
            self._check_header(number)

    def _check_header(self, number: int) -> None:
        record = self.manifest.files[number]
        index = record.name.endswith(layout.INDEX_SUFFIX)
        digest = xxhash.xxh3_128()
        raw = bytearray()
        for offset in range(0, record.header_bytes, CHUNK_BYTES):
            piece = self._read(number, offset, min(CHUNK_BYTES, record.header_bytes - offset))
            digest.update(piece.data)
            raw += b"" if index else piece.data  # an index is for other tools, and has no limit
        if digest.hexdigest() != record.header_digest:
            self._bad(f"{self._where(record)}: the header differs from what was saved")
        elif not index:
            self._compare_header(number, record, bytes(raw))

    def _compare_header(self, number: int, record: FileRecord, raw: bytes) -> None:
        try:
            if header_nbytes(raw, record.size) != record.header_bytes:
                raise CorruptCheckpoint("its header has another length than the manifest says")
            stored = parse_header(raw, record.size)
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(f"{self._where(record)}: {error}") from error
        told = {}
        for array in self.manifest.arrays:
            dtype = DTYPES[array.dtype]
            for part in array.slices:
                if part.file == number:
                    told[part.key] = (dtype.stored_as, dtype.stored_shape(part.shape), part.begin, part.end)
        found = {key: (t.stored_as, t.shape, t.begin, t.end) for key, t in stored.items()}
        if told != found:
            raise CorruptCheckpoint(f"{self._where(record)}: header and manifest tell different tensors")

    def read(self, wants: Sequence[Want], on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Fill every want's buffer with verified bytes, or raise ``CorruptCheckpoint`` that names the array.

        On an error buffers may be partly filled. ``on_bytes`` is told of bytes as they are checked.
        """
        self._run([block for want in wants for block in self._blocks_of(want)], on_bytes)

    def verify(self, on_bytes: Callable[[int], None] = lambda _: None) -> list[str]:
        """Check every byte; return what is wrong, a line each, empty if nothing is."""
        self._problems = problems = []
        try:
            self.check_headers()
            parts = [(index, part) for index, array in enumerate(self.manifest.arrays) for part in array.slices]
            self._run(
                [
                    _Block(part.file, begin, end, digest, index, None, 0)
                    for index, part in parts
                    for begin, end, digest in _digested(part)
                ],
                on_bytes,
            )
        except CorruptCheckpoint as error:
            problems.append(str(error))
        finally:
            self._problems = None
        return problems

    def _bad(self, problem: str) -> None:
        """Raise; or, in ``verify``, note it and go on."""
        if self._problems is None:
            raise CorruptCheckpoint(problem)
        self._problems.append(problem)

    def _blocks_of(self, want: Want) -> Iterator[_Block]:
        (part,) = self.manifest.arrays[want.array].slices
        first, last = part.begin + want.first, part.begin + want.last
        for begin, end, digest in _digested(part):
            if (begin < last and end > first) or begin == end:
                yield _Block(part.file, begin, end, digest, want.array, want.buffer, first)

    def _run(self, blocks: list[_Block], on_bytes: Callable[[int], None]) -> None:
        for number in {block.file for block in blocks}:
            self._open(number)
        _refuse_what_hangs(self._storage.description, [block.target for block in blocks])
        _Team(_groups(blocks), self._load_group, on_bytes, self._storage.description, self._where()).run()

    def _load_group(self, group: list[_Block], scratch: np.ndarray) -> None:
        if len(group) == 1:
            self._load(group[0], scratch)
            return
        first, last = group[0].begin, group[-1].end
        data = scratch[: last - first]
        self._fill(group[0].file, first, data)
        view = data.data
        for block in group:
            self._check(block, view[block.begin - first : block.end - first])
            if block.target is not None:
                block.target[:] = data[block.begin - first : block.end - first]

    def _load(self, block: _Block, scratch: np.ndarray) -> None:
        length = block.end - block.begin
        target = block.target
        if target is None:
            data = scratch[:length]
        elif block.begin >= block.target_begin and block.end <= block.target_begin + target.size:
            data = target[block.begin - block.target_begin : block.end - block.target_begin]
        else:  # only a part of the block is wanted, but all of it must be checked
            data = scratch[:length]
        self._fill(block.file, block.begin, data)
        self._check(block, data.data)
        if target is not None and data.base is scratch:
            first = max(block.begin, block.target_begin)
            last = min(block.end, block.target_begin + target.size)
            part = data[first - block.begin : last - block.begin]
            target[first - block.target_begin : last - block.target_begin] = part

    def _check(self, block: _Block, data: memoryview) -> None:
        if xxhash.xxh3_128_hexdigest(data) != block.digest:
            record = self.manifest.files[block.file]
            self._bad(
                f"{self._where(record)}: bytes {block.begin} to {block.end} of array "
                f"{self.names.get(block.array, block.array)} differ from what was saved"
            )

    def _read(self, number: int, offset: int, length: int) -> np.ndarray:
        data = np.empty(length, np.uint8)
        self._fill(number, offset, data)
        return data

    def _fill(self, number: int, offset: int, data: np.ndarray) -> None:
        if not data.size:
            return
        count = self._open(number).read_into(offset, data.data)
        if count != data.size:
            record = self.manifest.files[number]
            self._bad(f"{self._where(record)} ends at byte {offset + count}, before its data does")

    def _open(self, number: int) -> ReadableFile:
        if number not in self._files:
            name = f"{self._folder}/{self.manifest.files[number].name}"
            try:
                self._files[number] = self._storage.open_file(name)
            except NotFound as error:
                raise self._missing(name, error) from error
        return self._files[number]

    def _missing(self, name: str, error: NotFound) -> CorruptCheckpoint | Gone:
        try:
            self._storage.open_file(f"{self._folder}/{layout.MANIFEST}").close()
        except NotFound:
            return self._gone()
        return CorruptCheckpoint(f"{self._storage.description}/{name} is missing: {error}")

    def _gone(self) -> Gone:
        return Gone(f"{self._where()} was retired while it was read. List the checkpoints again")

    def _where(self, record: FileRecord | None = None) -> str:
        name = self._folder if record is None else f"{self._folder}/{record.name}"
        return f"{self._storage.description}/{name}"


class _Team:
    """Threads that load groups of blocks, while the caller waits as long as some progress is made."""

    def __init__(
        self,
        groups: Iterable[list[_Block]],
        load: Callable[[list[_Block], np.ndarray], None],
        on_bytes: Callable[[int], None],
        storage: str,
        where: str,
    ) -> None:
        self._groups = deque(groups)
        self._load = load
        self._on_bytes = on_bytes
        self._storage = storage
        self._where = where
        self._loading: dict[threading.Thread, list[_Block]] = {}
        self._changed = threading.Condition()
        self._working = 0
        self._checked_bytes = 0
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Return when all are loaded. Raises the first error; ``Unavailable`` if the storage falls silent."""
        try:
            self._start(min(limits.READ_THREADS, len(self._groups)))
            with self._changed:
                wait_for(
                    self._changed,
                    lambda: not self._working,
                    what=lambda: f"the bytes of {self._where}",
                    progress=lambda: self._checked_bytes,
                    stall_seconds=limits.STORAGE_SECONDS,
                )
        except BaseException as error:
            # Given up or interrupted: what does not hang must not go on to write into the caller's buffers.
            self._errors.append(error)
            with self._changed:
                self._changed.wait_for(lambda: not self._working, _LAST_BLOCK_SECONDS)
                _hanging.extend((thread, self._storage, group) for thread, group in self._loading.items())
            if isinstance(error, Deadline):
                raise Unavailable(f"the storage does not answer: {error}") from error
            raise
        if self._errors:
            raise self._errors[0]

    def _start(self, count: int) -> None:
        """As many threads as there is memory for. Without any, the caller does the work."""
        scratches = [np.empty(CHUNK_BYTES, np.uint8)] if count else []
        with contextlib.suppress(MemoryError):
            scratches += [np.empty(CHUNK_BYTES, np.uint8) for _ in range(count - 1) if room_for_threads()]
        self._working = len(scratches)
        started = 0
        with contextlib.suppress(RuntimeError):
            for scratch in scratches if room_for_threads() else ():
                SupervisedThread(functools.partial(self._drain, scratch), "midstride-read").start()
                started += 1
        with self._changed:
            self._working -= len(scratches) - started
        if scratches and not started:
            self._working = 1
            self._drain(scratches[0])

    def _drain(self, scratch: np.ndarray) -> None:
        try:
            while not self._errors and self._groups:
                with contextlib.suppress(IndexError):  # another took the last one meanwhile
                    group = self._groups.popleft()
                    self._loading[threading.current_thread()] = group
                    self._load(group, scratch)
                    nbytes = sum(block.end - block.begin for block in group)
                    self._on_bytes(nbytes)
                    self._progress(nbytes)
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._ended()

    def _progress(self, nbytes: int) -> None:
        with self._changed:
            self._checked_bytes += nbytes
            self._changed.notify_all()

    def _ended(self) -> None:
        with self._changed:
            self._loading.pop(threading.current_thread(), None)
            self._working -= 1
            self._changed.notify_all()


_hanging: list[tuple[threading.Thread, str, list[_Block]]] = []
"""Threads of this process that were given up in the middle of a read: thread, storage, what it reads."""


def _refuse_what_hangs(storage: str, targets: Sequence[np.ndarray | None]) -> None:
    """Raise ``Unavailable`` where a read that was given up may still write, or from whose storage it comes.

    When such a read returns, it fills its memory with what was wanted then: after a restore that went well
    since, that would be old weights among new ones. And each look at a storage that hangs would leave more threads.
    """
    _hanging[:] = [entry for entry in _hanging if entry[0].is_alive()]
    for _, hanging, group in _hanging:
        if hanging == storage:
            raise Unavailable(f"{storage} does not answer: a read of it still hangs. Look at the mount")
        held = [block.target for block in group if block.target is not None]
        if any(np.may_share_memory(one, other) for one in held for other in targets if other is not None):
            raise Unavailable(
                f"a read of {hanging} that still hangs may write into the objects that are to be restored. Build them "
                "anew, or wait until that storage answers"
            )


_LAST_BLOCK_SECONDS = 5.0
"""For the reads that are under way when a restore is given up."""


def _digested(part: Slice) -> Iterator[tuple[int, int, str]]:
    """The ranges of a slice that have a digest each."""
    if not part.blocks:
        yield part.begin, part.end, part.digest
        return
    for number, digest in enumerate(part.blocks):
        begin = part.begin + number * BLOCK_BYTES
        yield begin, min(begin + BLOCK_BYTES, part.end), digest


def _groups(blocks: list[_Block]) -> Iterator[list[_Block]]:
    """Neighbours in a file that are small and wanted whole are read as one."""
    group: list[_Block] = []
    for block in sorted(blocks, key=lambda b: (b.file, b.begin, b.end)):
        whole = block.target is None or (
            block.target_begin == block.begin and block.target.size == block.end - block.begin
        )
        fits = (
            bool(group)
            and whole
            and block.end - block.begin <= _SMALL_BYTES
            and block.file == group[-1].file
            and block.begin == group[-1].end
            and block.end - group[0].begin <= CHUNK_BYTES
            and group[-1].end - group[-1].begin <= _SMALL_BYTES
        )
        if not fits:
            if group:
                yield group
            group = []
        group.append(block)
        if not whole:
            yield group
            group = []
    if group:
        yield group
