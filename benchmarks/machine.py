"""The machine that a benchmark runs on: what its floors are, and whether it was ours alone meanwhile."""

from __future__ import annotations

import mmap
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import bare_writer
import numpy as np

MIB = 2**20
CANARY_LIMIT = 1.4
"""A copy that takes so many times the quickest one's time says that the machine is not ours."""
OTHERS_LIMIT = 0.05
"""Part of the cores' time that other processes may use."""


class Canary:
    """A copy in memory on all cores at once."""

    def __init__(self, nbytes: int = 128 * MIB) -> None:
        cores = os.cpu_count() or 1
        self._pieces = [(np.ones(nbytes // cores, np.uint8), np.ones(nbytes // cores, np.uint8)) for _ in range(cores)]
        self.quickest = min(self._once() for _ in range(10))

    def look(self) -> float:
        """How many times the quickest copy's time a copy takes now."""
        seconds = statistics.median(self._once() for _ in range(5))
        self.quickest = min(self.quickest, seconds)
        return seconds / self.quickest

    def _once(self) -> float:
        return together([lambda to=to, source=source: np.copyto(to, source) for to, source in self._pieces])


def together(actions: Iterable[Callable[[], object]]) -> float:
    """Seconds until all of them, each on a thread, have ended."""
    threads = [threading.Thread(target=action) for action in actions]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def user_seconds_of_others() -> float:
    """Of processes that are neither this one nor its children that have ended; not the kernel's writing back."""
    user, nice = (int(word) for word in Path("/proc/stat").read_text().split()[1:3])
    ours = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (user + nice) / os.sysconf("SC_CLK_TCK") - ours


def floors(nbytes: int, folder: Path) -> dict[str, float]:
    """A warm copy of as many bytes with all cores, and a direct write of them with fsync, nothing else running.

    The file is new and allocated, as each checkpoint's are; neither that nor giving its blocks back is in the time.
    """
    cores = os.cpu_count() or 1
    pieces = [(np.ones(nbytes // cores, np.uint8), np.ones(nbytes // cores, np.uint8)) for _ in range(cores)]
    copies = [together([lambda to=to, source=source: np.copyto(to, source) for to, source in pieces]) for _ in range(3)]
    del pieces
    path, chunk = folder / "floor", mmap.mmap(-1, bare_writer.CHUNK_BYTES)
    chunk.write(os.urandom(len(chunk)))
    bare_writer.allocate(path, nbytes)
    began = time.perf_counter()
    bare_writer.write(path, chunk)
    written = time.perf_counter() - began
    path.unlink()
    return {"warm memcpy": statistics.median(copies), "direct write + fsync": written}


def is_ours(canaries: list[float], others: float) -> bool:
    """Whether it was, by what the canary told before and after, and by the part of the cores' time that others used."""
    return max(canaries) <= CANARY_LIMIT and others <= OTHERS_LIMIT
