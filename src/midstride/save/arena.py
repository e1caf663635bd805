"""The staging memory: one region, mapped once, touched in the background, reused for every save.

Copying into memory that was never touched costs a page fault every 4 KiB; on virtual machines this
was measured at 8 to 12 times the cost of the copy itself. So the region is kept, and its pages are
made present (``prefault``) before the first save needs them where there is time to.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from midstride.forks import let_go_in_children
from midstride.limits import CHUNK_BYTES, PAGE_BYTES

_NAME = "midstride-arena"
_MEMFD = f"/memfd:{_NAME}"
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not among mmap's constants
_POPULATE_STEP_BYTES = 64 * 2**20  # between two looks at whether the arena was closed


class Arena:
    """``nbytes`` of page-aligned memory that a writer in another process can share.

    A forked child does not have it (``MADV_DONTFORK``): it could only corrupt a save or cost
    copies of pages.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(PAGE_BYTES, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)
        self._map, self.descriptor = _shared_memory(self.nbytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        let_go_in_children(self)
        self._closed = threading.Event()
        self._prefault: threading.Thread | None = None

    def prefault(self) -> None:
        """Start to make every page present, on a thread of its own that holds no interpreter lock."""
        if self._prefault is None:
            address = self.bytes.ctypes.data
            thread = threading.Thread(
                target=_populate, args=(address, self.nbytes, self._closed), name="midstride-prefault", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # no thread to be had: the copy makes the pages present
                thread.start()
                self._prefault = thread

    def close(self) -> None:
        """Give the memory back. Nobody may hold a view of it any more."""
        self._closed.set()
        if self._prefault is not None:
            self._prefault.join()
        self.bytes = np.empty(0, np.uint8)
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        try:
            self._map.close()
        except BufferError:
            # A view is alive, such as one in the traceback of a failed save that is kept: the addresses
            # stay its own until it goes, the memory behind them need not.
            if hasattr(mmap, "MADV_REMOVE"):
                with contextlib.suppress(OSError):
                    self._map.madvise(mmap.MADV_REMOVE)

    def leave_to_parent(self) -> None:
        if self.descriptor is None:
            return
        # The map has a copy of the descriptor that it will close by its number, so that is put to another use.
        ours = os.fstat(self.descriptor).st_ino
        with open(os.devnull, "rb") as nothing:
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{name}").startswith(_MEMFD) and os.fstat(int(name)).st_ino == ours:
                        os.dup2(nothing.fileno(), int(name), inheritable=False)


def _shared_memory(nbytes: int) -> tuple[mmap.mmap, int | None]:
    """The memory, and the descriptor by which another process can map it, where there is such a thing."""
    descriptor = None
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(_NAME)
        try:
            os.ftruncate(descriptor, nbytes)
            region = mmap.mmap(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
    else:
        region = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_DONTFORK"):
        region.madvise(mmap.MADV_DONTFORK)
    return region, descriptor


def _populate(address: int, nbytes: int, closed: threading.Event) -> None:
    try:
        madvise = ctypes.CDLL(None).madvise  # through ctypes, which releases the interpreter lock
    except (OSError, AttributeError):
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for offset in range(0, nbytes, _POPULATE_STEP_BYTES):
        if closed.is_set():
            return
        if madvise(address + offset, min(_POPULATE_STEP_BYTES, nbytes - offset), _MADV_POPULATE_WRITE):
            return  # an older system: the first save touches the pages instead


def budget_bytes(wanted: int | None) -> int:
    """The staging memory that a save may use: what the caller said, else half of what is available now."""
    return wanted if wanted is not None else available_bytes() // 2


def chunk_bytes(budget: int) -> int:
    """The size of pieces that a budget is cut into: the usual one where at least four fit."""
    return max(PAGE_BYTES * 16, min(CHUNK_BYTES, budget // 4 // PAGE_BYTES * PAGE_BYTES))


def available_bytes() -> int:
    """Memory that this process could still take: the system's, or its control group's if that is less."""
    found = [_system_available()]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, min(found))


def _system_available() -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 8 * 2**30
