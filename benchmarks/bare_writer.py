"""The floor of a loop that saves: a process that writes bytes directly to the disk and syncs them, when it is told to.

    python benchmarks/bare_writer.py FOLDER BYTES

It copies nothing and computes no digest. For each line on its standard input it writes one file, and says on its
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


def write(path: Path, nbytes: int, chunk: mmap.mmap) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    os.posix_fallocate(descriptor, 0, nbytes)
    for offset in range(0, nbytes, CHUNK_BYTES):
        os.pwrite(descriptor, chunk, offset)
    os.fsync(descriptor)
    os.close(descriptor)


def main() -> None:
    folder, nbytes = Path(sys.argv[1]), int(sys.argv[2])
    chunk = mmap.mmap(-1, CHUNK_BYTES)
    chunk.write(os.urandom(CHUNK_BYTES))
    print("ready", flush=True)
    for number, _ in enumerate(sys.stdin):
        write(folder / f"bare-{number % 2}", nbytes, chunk)
        print(time.perf_counter(), flush=True)
    print(time.process_time(), flush=True)


if __name__ == "__main__":
    main()
