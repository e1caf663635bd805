"""The floor of a loop that saves: a process that writes bytes directly to the disk and syncs them, when it is told to.

    python benchmarks/bare_writer.py FOLDER BYTES

It copies nothing and computes no digest. Its two files are allocated before it says that it is ready, so that no blocks
are looked for or given back while it writes. For each line on its standard input it writes one of them, and says on its
standard output when that was durable, by the clock of ``time.perf_counter``, which is one for all processes. At the
end it says how many seconds of CPU it took.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path

CHUNK_BYTES = 16 * 2**20


def allocate(path: Path, nbytes: int) -> None:
    """Make a file, which does not exist, of so many bytes in whole pages."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.posix_fallocate(descriptor, 0, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    os.fsync(descriptor)
    os.close(descriptor)


def write(path: Path, chunk: mmap.mmap) -> None:
    """Fill an allocated file, and sync it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_DIRECT)
    nbytes = os.fstat(descriptor).st_size
    for offset in range(0, nbytes, CHUNK_BYTES):
        os.pwrite(descriptor, memoryview(chunk)[: nbytes - offset], offset)
    os.fsync(descriptor)
    os.close(descriptor)


def main() -> None:
    folder, nbytes = Path(sys.argv[1]), int(sys.argv[2])
    chunk = mmap.mmap(-1, CHUNK_BYTES)
    chunk.write(os.urandom(CHUNK_BYTES))
    paths = [folder / "bare-0", folder / "bare-1"]
    for path in paths:
        allocate(path, nbytes)
    print("ready", flush=True)
    for number, _ in enumerate(sys.stdin):
        write(paths[number % 2], chunk)
        print(time.perf_counter(), flush=True)
    print(time.process_time(), flush=True)


if __name__ == "__main__":
    main()
