"""Every name on disk, made and parsed here only.

    RUN/
    ├── midstride.json                        MARKER
    ├── .lock                                 LOCK
    ├── writer.log                            WRITER_LOG
    └── step-000000000500-3f9c01a7/           step_folder(500, "3f9c01a7")
        ├── model.safetensors                 data_file(stem, 1, 1)
        ├── big-00001-of-00002.safetensors    data_file(stem, 1, 2)
        ├── big.safetensors.index.json        index_file(stem)
        └── manifest.json                     MANIFEST, by way of MANIFEST_DRAFT

File names come from a small alphabet that every file system can hold; they are never raw keys.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

MARKER = "midstride.json"
LOCK = ".lock"
WRITER_LOG = "writer.log"
MANIFEST = "manifest.json"
MANIFEST_DRAFT = "manifest.json.tmp"
INDEX_SUFFIX = ".safetensors.index.json"

_STEP_FOLDER = re.compile(r"step-([0-9]{1,19})-([0-9a-f]{8})", re.ASCII)
_DATA_FILE = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,120}\.safetensors(\.index\.json)?", re.ASCII)
_UNSAFE = re.compile(r"[^a-z0-9_-]+", re.ASCII)
# Device names that Windows gives a meaning in every folder, whatever the suffix.
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])", re.ASCII)

_SHARD = re.compile(r"-([0-9]{5})-of-([0-9]{5})$", re.ASCII)

MAX_STEP = 2**63 - 1


@dataclass(frozen=True, slots=True)
class StepFolder:
    """A step folder's name, taken apart."""

    name: str
    step: int
    attempt: str


def step_folder(step: int, attempt: str) -> str:
    """Name of the folder of one attempt. The zero padding is for people; order is by number."""
    return f"step-{step:012d}-{attempt}"


def parse_step_folder(name: str) -> StepFolder | None:
    """The parts of a step folder's name; None for a name that this library does not make."""
    match = _STEP_FOLDER.fullmatch(name)
    if match is None or int(match[1]) > MAX_STEP:
        return None
    return StepFolder(name, int(match[1]), match[2])


def file_stem(key: object, taken: Container[str]) -> str:
    """A file name's first part for the item under ``key``: safe, and not in ``taken``."""
    stem = _UNSAFE.sub("-", str(key).lower()).strip("-")[:64] or "item"
    stem = _SHARD.sub(r"-\1-of_\2", stem)  # so that no item is named like a shard of another
    if _RESERVED.fullmatch(stem):
        stem = f"item-{stem}"
    unique, number = stem, 1
    while unique in taken:
        number += 1
        unique = f"{stem}-{number}"
    return unique


def data_file(stem: str, number: int, count: int) -> str:
    """Name of data file ``number`` of ``count``; Hugging Face's convention where there are several."""
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"


def index_file(stem: str) -> str:
    """Name of the index that says which tensor lies in which of an item's several data files."""
    return stem + INDEX_SUFFIX


def is_data_file(name: str) -> bool:
    """True for a name that ``data_file`` or ``index_file`` can make."""
    return _DATA_FILE.fullmatch(name) is not None


def unique_tensor_key(key: str, taken: Container[str]) -> str:
    """``key``, or ``key#2`` and so on where it is taken or means something else in safetensors."""
    unique, number = key, 1
    while unique in taken or unique == "__metadata__":
        number += 1
        unique = f"{key}#{number}"
    return unique
