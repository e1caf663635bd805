"""Every limit and tuning number, with its unit and its reason.

Deadlines are counted while nothing progresses: long work that moves on is never cut off.
"""

from __future__ import annotations

WRITER_SECONDS = 30.0
"""For the writer to start or to end."""
STORAGE_SECONDS = 120.0
"""For one storage operation, such as a write to a mount that went away."""
EXIT_SECONDS = 60.0
"""For the last save, when the ``Checkpointer`` is closed or the interpreter exits."""
LOCK_SECONDS = 60.0
"""For a lock's owner that shows no sign of life, where a heartbeat stands in for flock."""
HEARTBEAT_SECONDS = 5.0
"""Between two signs of life: a dozen may be missed."""
RETRY_SECONDS = (0.5, 2.0, 8.0)
"""Pauses before a save whose storage was unavailable is tried again; after the last one it has failed."""

UNSYNCED_BYTES = 256 * 2**20
"""Written through the page cache before they are synced: one sync ends in time also on a slow disk, and
dirty pages stay few."""
PAGE_BYTES = 4096
"""Alignment of staging memory, of direct I/O, and of the data in a data file."""
CHUNK_BYTES = 16 * 2**20
"""Largest piece that is staged and written at once: past 8 MiB disks gain nothing more."""
BLOCK_BYTES = 16 * 2**20
"""What one digest covers. Part of the format: never changed without a new one."""
SPLIT_BYTES = 5 * 10**9
"""Largest data file, as Hugging Face's tools split; a single larger array is not cut."""
HEADER_LIMIT_BYTES = 100 * 10**6
"""Largest header that safetensors readers accept."""
MANIFEST_LIMIT_BYTES = 2**30
"""Larger than any manifest of ours (some 300 bytes an array); more is refused before it is read."""
MAX_ITEM_FILES = 32
"""Top-level items of a state with a data file each; with more, all arrays share one."""
OPEN_FILES_AHEAD = 16
"""Data files made, and so their space reserved, before the first byte is written."""
READ_THREADS = 4
"""Reads in flight on a restore: enough to keep a disk busy while digests are computed."""


def as_they_are() -> dict[str, object]:
    """All limits by name: a writer process has the same as its trainer."""
    return {name: value for name, value in globals().items() if name.isupper()}


def set_to(values: dict[str, object]) -> None:
    """Take over what ``as_they_are()`` gave in another process."""
    globals().update(values)
