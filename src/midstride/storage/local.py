"""A folder on a local disk, or on a network mount that behaves like one."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from midstride.errors import NoSpace, NotFound, PermissionDenied, StorageError, Unavailable
from midstride.limits import PAGE_BYTES
from midstride.storage.base import Entry, Lock, ReadableFile, WritableFile
from midstride.storage.lock import take_lock

_DIRECT = getattr(os, "O_DIRECT", 0)

_ERRORS: dict[int, type[StorageError]] = {
    errno.ENOENT: NotFound,
    errno.ENOTDIR: NotFound,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EFBIG: NoSpace,
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
    errno.EROFS: PermissionDenied,
}
"""What each errno means to a caller; any other is ``Unavailable``."""


def storage_error(error: OSError, what: str, path: object) -> StorageError:
    """The library's error for the operating system's."""
    kind = _ERRORS.get(error.errno or 0, Unavailable)
    return kind(f"{what} {path}: {error.strerror or error}")


@contextmanager
def _told(what: str, path: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(error, what, path) from error


class LocalStorage:
    """``storage.base.Storage`` for a folder. Nothing is made before ``make_root``."""

    block_bytes = PAGE_BYTES

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Absolute once: a training script that changes its folder later must not take the run along.
        self._root = os.path.abspath(os.fspath(path))
        if "\0" in self._root:
            raise ValueError(f"{path!r} has a NUL in it")
        self.description = self._root.encode("utf-8", "backslashreplace").decode()

    def make_root(self) -> None:
        missing = []
        folder = self._root
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for made in reversed(missing):
            with _told("make the folder", made):
                try:
                    os.mkdir(made)
                except FileExistsError:
                    if not os.path.isdir(made):
                        raise
                # The name of a new folder lies in its parent: unsynced, the whole run could vanish.
                _sync_folder(os.path.dirname(made))

    def list_folder(self, folder: str) -> list[Entry]:
        path = self._path(folder)
        with _told("list", path), os.scandir(path) as entries:
            return [Entry(entry.name, _kind(entry)) for entry in entries]

    def make_folder(self, folder: str) -> None:
        path = self._path(folder)
        with _told("make the folder", path):
            os.mkdir(path)

    def create_file(self, name: str, size: int) -> WritableFile:
        return _LocalWriter(self._path(name), size)

    def open_file(self, name: str) -> ReadableFile:
        path = self._path(name)
        try:
            return _LocalReader(path)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise StorageError(f"{path} is a link, and links are not read") from error
            raise storage_error(error, "open", path) from error

    def rename(self, old: str, new: str) -> None:
        source, target = self._path(old), self._path(new)
        with _told(f"rename to {target}:", source):
            os.replace(source, target)

    def sync_folder(self, folder: str) -> None:
        path = self._path(folder)
        with _told("sync the folder", path):
            _sync_folder(path)

    def remove_file(self, name: str) -> None:
        path = self._path(name)
        with _told("remove", path):
            os.unlink(path)

    def remove_folder(self, folder: str) -> None:
        path = self._path(folder)
        with _told("remove the folder", path):
            if os.path.islink(path):
                os.unlink(path)
            else:
                os.rmdir(path)

    def lock(self, name: str, owner: str) -> Lock:
        path = self._path(name)
        with _told("lock", path):
            return take_lock(path, owner)

    def _path(self, name: str) -> str:
        if not name:
            return self._root
        parts = name.split("/")
        if "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
            raise StorageError(f"{name!r} is not a name inside {self.description}")
        return os.path.join(self._root, *parts)


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "other"
    return "folder" if entry.is_dir() else "file" if entry.is_file() else "other"


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _LocalWriter:
    """Writes past the page cache where it can: those bytes would be synced at once anyway, and would
    push the training's own data out of memory."""

    def __init__(self, path: str, size: int) -> None:
        self._path = path
        self._size = size
        self._descriptor = -1
        self._direct = -1
        with _told("make", path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            self._reserve()
            self._direct = _open_direct(path) if size >= PAGE_BYTES else -1
        except BaseException:
            self.close()
            os.unlink(path)
            raise

    def _reserve(self) -> None:
        if not self._size:
            return
        code = _fallocate(self._descriptor, self._size)
        if code in (errno.ENOSPC, errno.EDQUOT):
            free = os.statvfs(os.path.dirname(self._path))
            available = free.f_bavail * free.f_frsize
            raise NoSpace(f"{self._path}: {self._size} bytes are needed and {available} are free")
        if code not in (0, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise storage_error(OSError(code, os.strerror(code)), "reserve space for", self._path)
        # Without preallocation the size still becomes exact here, and holes are filled by the writes.
        with _told("set the size of", self._path):
            os.ftruncate(self._descriptor, self._size)

    def write(self, offset: int, data: memoryview) -> None:
        view = data.cast("B") if data.format != "B" or data.ndim != 1 else data
        with _told("write", self._path):
            done = self._write_direct(offset, view) if self._direct >= 0 and offset % PAGE_BYTES == 0 else 0
            while done < len(view):
                done += os.pwrite(self._descriptor, view[done:], offset + done)

    def _write_direct(self, offset: int, view: memoryview) -> int:
        """Write the whole blocks of ``view``; return how many bytes that were."""
        whole = len(view) // PAGE_BYTES * PAGE_BYTES
        done = 0
        while done < whole:
            try:
                count = os.pwrite(self._direct, view[done:whole], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL:  # memory or file system that direct writes are not for
                    return done
                raise
            done += count
            if count % PAGE_BYTES:
                return done
        tail = len(view) - whole
        if tail and offset + len(view) == self._size:
            self._write_padded(offset + whole, view[whole:])
            return len(view)
        return done

    def _write_padded(self, offset: int, tail: memoryview) -> None:
        # The last block, padded, and the file cut to its size again: no byte goes through the page cache.
        with mmap.mmap(-1, PAGE_BYTES) as block:
            block[: len(tail)] = tail
            if os.pwrite(self._direct, block, offset) != PAGE_BYTES:
                raise OSError(errno.EIO, "a short write of the last block")
        os.ftruncate(self._descriptor, self._size)

    def sync(self) -> None:
        with _told("sync", self._path):
            if hasattr(fcntl, "F_FULLFSYNC"):
                fcntl.fcntl(self._descriptor, fcntl.F_FULLFSYNC)
            elif hasattr(os, "fdatasync"):
                os.fdatasync(self._descriptor)
            else:
                os.fsync(self._descriptor)

    def close(self) -> None:
        for descriptor in (self._descriptor, self._direct):
            _close(descriptor)
        self._descriptor = self._direct = -1


def _close(descriptor: int) -> None:
    # What was synced is safe whatever close() says, and what was not is given up; the descriptor is
    # free in any case.
    if descriptor >= 0:
        with suppress(OSError):
            os.close(descriptor)


def _open_direct(path: str) -> int:
    if not _DIRECT:
        return -1
    try:
        return os.open(path, os.O_WRONLY | _DIRECT)
    except OSError:  # a file system without direct I/O
        return -1


def _fallocate(descriptor: int, size: int) -> int:
    """fallocate(2) itself: glibc's posix_fallocate writes every block where the call is not supported."""
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return errno.ENOSYS
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(descriptor, 0, 0, size):
        if (code := ctypes.get_errno()) != errno.EINTR:
            return code
    return 0


class _LocalReader:
    """Opens without following a link and without blocking on a pipe; then takes regular files alone."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise StorageError(f"{path} is not a regular file")
        self.size = status.st_size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        done = 0
        with _told("read", self._path):
            while done < len(buffer):
                count = self._read(offset + done, buffer[done:])
                if not count:
                    break
                done += count
        return done

    def _read(self, offset: int, buffer: memoryview) -> int:
        try:
            return os.preadv(self._descriptor, [buffer], offset)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            # A network mount replaced what the name stands for while we held it: look once more.
            fresh = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                return os.preadv(fresh, [buffer], offset)
            finally:
                os.close(fresh)

    def close(self) -> None:
        _close(self._descriptor)
        self._descriptor = -1
