"""A folder of TensorFlow checkpoints: which there are, whether their bytes are those that were written.

Needs no TensorFlow. Beside each checkpoint that Midstride writes, ``model.ckpt-500.midstride.json``
has the digest of each of its files, its step and when it was made; it is durable before the state
file names the checkpoint. ``docs/format.md`` describes it.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import xxhash

from midstride.errors import CorruptCheckpoint, MidstrideError, NewerFormat, NotCommitted, NotFound
from midstride.format import layout
from midstride.info import CheckpointInfo
from midstride.limits import CHUNK_BYTES
from midstride.restore.catalog import Catalog, Unusable
from midstride.save.commit import replace_whole
from midstride.storage.base import ReadableStorage, Storage
from midstride.storage.bounded import BoundedReads
from midstride.storage.local import LocalStorage

_log = logging.getLogger("midstride")

DIGESTS_SUFFIX = ".midstride.json"
STATE_FILE = "checkpoint"
STATE_FILE_DRAFT = f"{STATE_FILE}.midstride-draft"
_FORMAT = 1
_END_OF_NAME = re.compile(r"(-\d{5}-of-\d{5})?|\.(index|meta|data-\d{5}-of-\d{5})")
_LEFTOVER = re.compile(r"\.tempstate\d+$|-\d+_temp$|\.tmp[0-9a-f]*$|\.midstride[_-](temp|draft|unfinished)$")
_LIMIT_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class FileDigest:
    """One file of a checkpoint."""

    name: str
    nbytes: int
    digest: str
    """xxh3-128 of its bytes."""


@dataclass(frozen=True, slots=True)
class Digests:
    """What a digest file says."""

    step: int
    created: str
    files: tuple[FileDigest, ...]

    def encode(self) -> bytes:
        """One line of JSON for the content, one for its digest."""
        files = [{"name": f.name, "bytes": f.nbytes, "digest": f.digest} for f in self.files]
        content = json.dumps({"format": _FORMAT, "step": self.step, "created": self.created, "files": files})
        return f"{content}\n{json.dumps({'digest': xxhash.xxh3_128_hexdigest(content.encode())})}\n".encode()

    @classmethod
    def decode(cls, raw: bytes) -> Digests:
        """Raises ``CorruptCheckpoint``, or ``NewerFormat`` for a file of a later release."""
        try:
            content, seal, rest = raw.decode().split("\n")
            data = json.loads(content)
            if type(data["format"]) is int and data["format"] > _FORMAT:
                raise NewerFormat(f"its digest file has format {data['format']}: upgrade Midstride to read it")
            if rest or json.loads(seal) != {"digest": xxhash.xxh3_128_hexdigest(content.encode())}:
                raise CorruptCheckpoint("its digest file is damaged")
            files = tuple(FileDigest(str(f["name"]), int(f["bytes"]), str(f["digest"])) for f in data["files"])
            return cls(int(data["step"]), str(data["created"]), files)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptCheckpoint("its digest file is damaged") from error


def is_file_of(prefix: str, name: str) -> bool:
    """Whether a name is that of a file of the checkpoint ``prefix``, in either of TensorFlow's formats."""
    return name.startswith(prefix) and _END_OF_NAME.fullmatch(name, len(prefix)) is not None


def record_digests(folder: str, prefix: str, step: int) -> CheckpointInfo:
    """Digest the files of a checkpoint, whose bytes are durable, and make the record of it durable too."""
    storage = LocalStorage(folder)
    names = sorted(entry.name for entry in storage.list_folder("") if is_file_of(prefix, entry.name))
    files = tuple(FileDigest(name, *_digest_of(storage, name, lambda _: None)) for name in names)
    digests = Digests(step, datetime.now(UTC).isoformat(timespec="microseconds"), files)
    replace_whole(storage, prefix + DIGESTS_SUFFIX, digests.encode())
    return _info(prefix, digests)


def sweep_digests(folder: str, basename: str) -> None:
    """Remove the digest files of checkpoints that are deleted."""
    storage = LocalStorage(folder)
    names = {entry.name for entry in storage.list_folder("")}
    for name in names:
        prefix = name.removesuffix(DIGESTS_SUFFIX)
        if prefix != name and prefix.startswith(f"{basename}-") and not any(is_file_of(prefix, n) for n in names):
            storage.remove_file(name)


class CheckpointFolder:
    """A folder of TensorFlow checkpoints, for reading alone. ``NotFound`` where there is none."""

    def __init__(self, path: str | os.PathLike[str] | Storage) -> None:
        storage: ReadableStorage = path if isinstance(path, Storage) else LocalStorage(path)
        self._storage = BoundedReads(storage)
        self.description = storage.description
        self._names()

    @classmethod
    def is_one(cls, path: str | os.PathLike[str]) -> bool:
        """Whether a folder looks like one: it has digest files or a state file, and no run of the native format."""
        try:
            names = cls(path)._names()
        except MidstrideError:
            return False
        return layout.MARKER not in names and any(n == STATE_FILE or n.endswith(DIGESTS_SUFFIX) for n in names)

    def scan(self) -> Catalog:
        """What the folder holds, oldest first. Files are looked at for their sizes; ``verify`` reads them.

        A checkpoint without digests, which Midstride did not write, is listed without the time it was made.
        """
        entries = self._storage.list_folder("")
        names = [entry.name for entry in entries if entry.kind == "file"]
        catalog = Catalog(marked=STATE_FILE in names)
        catalog.debris = [entry.name for entry in entries if _LEFTOVER.search(entry.name)]
        for prefix in self._prefixes(names):
            try:
                catalog.checkpoints.append(self._look_at(prefix, names))
            except MidstrideError as problem:
                catalog.unusable.append(Unusable(prefix, _step_of(prefix) or 0, None, problem))
        return catalog

    def checkpoints(self) -> list[CheckpointInfo]:
        """Those whose files are there with the sizes that they were written with, oldest first."""
        catalog = self.scan()
        for entry in catalog.unusable:
            _log.warning("%s cannot be used: %s", entry.folder, entry.problem)
        return catalog.checkpoints

    def _look_at(self, prefix: str, names: list[str]) -> CheckpointInfo:
        own = [name for name in names if is_file_of(prefix, name)]
        try:
            digests = self.digests(prefix)
        except NotFound:
            sizes = tuple(FileDigest(name, self._size_of(name), "") for name in own)
            return _info(prefix, Digests(_step_of(prefix) or 0, "", sizes))
        for file in digests.files:
            if file.name not in own:
                raise CorruptCheckpoint(f"{self.description}/{file.name} is missing")
            if (size := self._size_of(file.name)) != file.nbytes:
                raise CorruptCheckpoint(
                    f"{self.description}/{file.name} has {size} bytes, it was written with {file.nbytes}"
                )
        return _info(prefix, digests)

    def _size_of(self, name: str) -> int:
        file = self._storage.open_file(name)
        file.close()
        return file.size

    def _prefixes(self, names: list[str]) -> list[str]:
        """The names of the checkpoints, oldest first: in the order of the state file, those that it has not before."""
        stated = [prefix for prefix in self._stated(names) if any(is_file_of(prefix, name) for name in names)]
        others = [name.removesuffix(DIGESTS_SUFFIX) for name in names if name.endswith(DIGESTS_SUFFIX)]
        made = {prefix: self._created(prefix) for prefix in others if prefix not in stated}
        return [*sorted(made, key=made.__getitem__), *stated]

    def digests(self, prefix: str) -> Digests:
        """The record of one checkpoint. ``NotFound`` if it has none."""
        raw = _read(self._storage, prefix + DIGESTS_SUFFIX)
        try:
            return Digests.decode(raw)
        except (CorruptCheckpoint, NewerFormat) as error:
            raise type(error)(f"{self.description}/{prefix}: {error}") from error

    def verify(self, step: int | None = None, on_bytes: Callable[[int], None] = lambda _: None) -> dict[str, list[str]]:
        """Check every byte of all checkpoints, or of one step's: prefix -> what is wrong, empty if nothing is.

        Those without digests are left out: see ``unchecked``. ``NotCommitted`` if there is no such step.
        """
        without = self.unchecked(step)
        prefixes = [p for p in self._of_step(step) if p not in without]
        return {prefix: list(self.problems(prefix, on_bytes)) for prefix in prefixes}

    def unchecked(self, step: int | None = None) -> list[str]:
        """The prefixes of the checkpoints, or of one step's, that have no digests: Midstride did not write them."""
        names = self._names()
        return [prefix for prefix in self._of_step(step) if prefix + DIGESTS_SUFFIX not in names]

    def _of_step(self, step: int | None) -> list[str]:
        prefixes = [p for p in self._prefixes(self._names()) if step is None or _step_of(p) == step]
        if step is not None and not prefixes:
            raise NotCommitted(f"{self.description} has no checkpoint of step {step}")
        return prefixes

    def problems(self, prefix: str, on_bytes: Callable[[int], None] = lambda _: None) -> Iterator[str]:
        """What is wrong with one checkpoint, a line each."""
        try:
            digests = self.digests(prefix)
        except NotFound:
            yield f"{self.description}/{prefix} has no digests: it was not written by Midstride, and cannot be checked"
            return
        except (CorruptCheckpoint, NewerFormat) as error:
            yield str(error)
            return
        for file in digests.files:
            where = f"{self.description}/{file.name}"
            if not is_file_of(prefix, file.name):
                yield f"{self.description}/{prefix}: its digest file names {file.name!r}, which is not its own"
                continue
            try:
                nbytes, digest = _digest_of(self._storage, file.name, on_bytes)
            except NotFound:
                yield f"{where} is missing"
                continue
            if nbytes != file.nbytes:
                yield f"{where} has {nbytes} bytes, it was written with {file.nbytes}"
            elif digest != file.digest:
                yield f"{where} differs from what was written"

    def latest(self, good: Callable[[str], Iterable[str]] | None = None) -> str | None:
        """The prefix of the newest checkpoint in which nothing is wrong; those passed over are logged, by name."""
        for prefix in reversed(self._prefixes(self._names())):
            problems = list((good or self.problems)(prefix))
            if not problems:
                return prefix
            _log.warning("%s was passed over: %s", prefix, "; ".join(problems))
        return None

    def _names(self) -> list[str]:
        return [entry.name for entry in self._storage.list_folder("") if entry.kind == "file"]

    def _stated(self, names: list[str]) -> list[str]:
        """What the state file names, oldest first, as names in this folder: it may have been moved as a whole."""
        if STATE_FILE not in names:
            return []
        text = _read(self._storage, STATE_FILE).decode(errors="replace")
        paths = [_unescape(m[2]) for m in re.finditer(r'^(all_)?model_checkpoint_paths?: "(.*)"$', text, re.MULTILINE)]
        names_of = [os.path.basename(path) for path in paths]
        # The first is the newest, wherever the list has it: a state file may have been set back by hand.
        return [*dict.fromkeys(name for name in names_of if name != names_of[0]), *names_of[:1]]

    def _created(self, prefix: str) -> tuple[str, int]:
        try:
            digests = self.digests(prefix)
        except MidstrideError:
            return ("", _step_of(prefix) or 0)
        return (digests.created, digests.step)


def _info(prefix: str, digests: Digests) -> CheckpointInfo:
    return CheckpointInfo(
        step=digests.step, seq=digests.step, parent=None, run="", name=prefix, created=digests.created,
        nbytes=sum(file.nbytes for file in digests.files),
    )  # fmt: skip


def _step_of(prefix: str) -> int | None:
    found = re.search(r"-(\d+)$", prefix)
    return int(found[1]) if found else None


def _read(storage: ReadableStorage, name: str) -> bytes:
    file = storage.open_file(name)
    try:
        if file.size > _LIMIT_BYTES:
            raise CorruptCheckpoint(f"{storage.description}/{name} has {file.size} bytes, which is none of its kind")
        raw = bytearray(file.size)
        return bytes(raw[: file.read_into(0, memoryview(raw))])
    finally:
        file.close()


def _digest_of(storage: ReadableStorage, name: str, on_bytes: Callable[[int], None]) -> tuple[int, str]:
    file = storage.open_file(name)
    try:
        digest, buffer, done = xxhash.xxh3_128(), bytearray(min(file.size, CHUNK_BYTES)), 0
        while done < file.size:
            count = file.read_into(done, memoryview(buffer)[: file.size - done])
            if not count:
                break
            digest.update(memoryview(buffer)[:count])
            done += count
            on_bytes(count)
        return done, digest.hexdigest()
    finally:
        file.close()


def _unescape(text: str) -> str:
    """A string of protocol buffers' text format: bytes beyond ASCII are in octal."""
    data: Any = text.encode("ascii", "backslashreplace").decode("unicode_escape").encode("latin-1", "replace")
    return str(data.decode(errors="surrogateescape"))
