"""A folder on a local disk, or on a network mount that behaves like one."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from contextlib import suppress

from midstride import limits
from midstride.errors import NoSpace, StorageError
from midstride.limits import PAGE_BYTES
from midstride.storage.base import Entry, Lock, ReadableFile, WritableFile
from midstride.storage.lock import left_at, take_lock
from midstride.storage.names import check_name
from midstride.storage.system_errors import printable, storage_error, told

_DIRECT = getattr(os, "O_DIRECT", 0)


class LocalStorage:
    """``storage.base.Storage`` for a folder. Nothing is made before ``make_root``.

    The root may be, or be reached through, a link. Of the folders in it, one that is a link (a step
    that somebody moved to another disk) is read, and never written in; a deeper link is refused, and
    so is a file that is a link.
    """

    block_bytes = PAGE_BYTES
    shared = True
    """A pickled copy in another process of this machine is the same storage."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Absolute once: a training script that changes its folder later must not take the run along.
        self._root = os.path.abspath(os.fsdecode(path))
        if "\0" in self._root:
            raise ValueError(f"{path!r} has a NUL in it")
        self.description = printable(self._root)

    @property
    def root(self) -> str:
        """The folder's absolute path."""
        return self._root

    def make_root(self) -> None:
        missing = []
        folder = self._root
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        self._sync_name_of_existing(folder)
        for made in reversed(missing):
            with told("make the folder", made):
                try:
                    os.mkdir(made)
                except FileExistsError:
                    if not os.path.isdir(made):
                        raise
                # The name of a new folder lies in its parent: unsynced, the whole run could vanish.
                _sync_folder(os.path.dirname(made))

    def _sync_name_of_existing(self, folder: str) -> None:
        # A folder that is there may be seconds old: made by a process that was killed before it could
        # sync the name, or by `mkdir`. Another's parent that we may not open is not ours to sync.
        parent = os.path.dirname(folder)
        try:
            _sync_folder(parent)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL):
                raise storage_error(error, "sync the folder", parent) from error

    def list_folder(self, folder: str) -> list[Entry]:
        path = self._folder(folder)
        if not folder and os.path.lexists(path) and not os.path.isdir(path):
            # A link to a mount that is away must not look like a place where nothing was ever saved.
            what = "a link that leads nowhere: is a disk not mounted?" if os.path.islink(path) else "not a folder"
            raise StorageError(f"{self.description} is {what}")
        with told("list", path), os.scandir(path) as entries:
            return [Entry(entry.name, _kind(entry)) for entry in entries]

    def make_folder(self, folder: str) -> None:
        path = self._path(folder)
        with told("make the folder", path):
            os.mkdir(path)

    def create_file(self, name: str, size: int) -> WritableFile:
        return _LocalWriter(self._path(name), size)

    def open_file(self, name: str) -> ReadableFile:
        path = self._path(name, reading=True)
        try:
            return _LocalReader(path)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise StorageError(f"{printable(path)} is a link, and files that are links are not read") from error
            if error.errno == errno.ENXIO:
                raise StorageError(f"{printable(path)} is not a regular file") from error
            raise storage_error(error, "open", path) from error

    def rename(self, old: str, new: str) -> None:
        source, target = self._path(old), self._path(new)
        with told(f"rename to {printable(target)}:", source):
            os.replace(source, target)

    def sync_folder(self, folder: str) -> None:
        path = self._folder(folder)
        with told("sync the folder", path):
            _sync_folder(path)

    def remove_file(self, name: str) -> None:
        path = self._path(name)
        with told("remove", path):
            os.unlink(path)

    def remove_folder(self, folder: str) -> None:
        path = self._path(folder)
        with told("remove the folder", path):
            if os.path.islink(path):
                os.unlink(path)
            else:
                os.rmdir(path)

    def lock(self, name: str, owner: str) -> Lock:
        path = self._path(name)
        with told("lock", path):
            return take_lock(path, owner)

    def left_at(self, name: str) -> str | None:
        """A sign of life, which changes, of the writer process that holds the lock ``name`` for a run that died.

        None where there is no such process.
        """
        return left_at(self._path(name))

    def _path(self, name: str, *, reading: bool = False) -> str:
        """The full path, once the name and the folders on the way are seen to stay in the root."""
        check_name(name, self.description)
        path = self._root
        *folders, last = name.split("/")
        for depth, part in enumerate(folders):
            path = os.path.join(path, part)
            if os.path.islink(path) and not (reading and depth == 0):
                raise StorageError(
                    f"{printable(path)} is a link: nothing is written through one, and only a link that lies "
                    f"directly in {self.description} is read through"
                )
        return os.path.join(path, last) if last else path

    def _folder(self, folder: str) -> str:
        path = self._path(folder, reading=True)
        if "/" in folder and os.path.islink(path):
            raise StorageError(f"{printable(path)} is a link that lies too deep to be read through")
        return path


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "other"
    return "folder" if entry.is_dir() else "file" if entry.is_file() else "other"


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _full_sync(descriptor):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: str) -> None:
    """Return when the bytes of a file that something else wrote are on stable storage."""
    with told("sync", path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if not _full_sync(descriptor):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _full_sync(descriptor: int) -> bool:
    """macOS: fsync leaves the bytes in the drive's cache, this call does not. False where it does not exist."""
    if not hasattr(fcntl, "F_FULLFSYNC"):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY):
            raise  # a failed sync is never retried by another call
        return False
    return True


class _LocalWriter:
    """Writes past the page cache where it can: those bytes would be synced at once anyway, and would
    push the training's own data out of memory."""

    def __init__(self, path: str, size: int) -> None:
        self._path = path
        self._size = size
        self._descriptor = -1
        self._direct = -1
        self._unsynced = 0
        """Bytes that went through the page cache since the last sync."""
        with told("make", path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            self._reserve()
            self._direct = _open_direct(path) if size >= PAGE_BYTES else -1
        except BaseException:
            self.close()
            with suppress(OSError):  # what failed first is what is told
                os.unlink(path)
            raise

    def _reserve(self) -> None:
        if not self._size:
            return
        code = _fallocate(self._descriptor, self._size)
        if code not in (0, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            error = OSError(code, os.strerror(code))
            if code == errno.ENOSPC:
                free = _free_bytes(self._path)
                raise NoSpace(f"{printable(self._path)}: {self._size} bytes are needed and {free} are free") from error
            raise storage_error(error, f"reserve {self._size} bytes for", self._path) from error
        # Without preallocation the size still becomes exact here, and holes are filled by the writes.
        with told("set the size of", self._path):
            os.ftruncate(self._descriptor, self._size)

    def write(self, offset: int, data: memoryview) -> None:
        view = data.cast("B") if data.format != "B" or data.ndim != 1 else data
        with told("write", self._path):
            done = self._write_direct(offset, view) if self._direct >= 0 and offset % PAGE_BYTES == 0 else 0
            self._unsynced += len(view) - done
            while done < len(view):
                count = os.pwrite(self._descriptor, view[done:], offset + done)
                if not count:
                    raise OSError(errno.EIO, "the file system took no bytes")
                done += count
        if self._unsynced >= limits.UNSYNCED_BYTES:
            self.sync()

    def _write_direct(self, offset: int, view: memoryview) -> int:
        """Write what can be written directly; return how many bytes from the start of ``view`` that was."""
        whole = len(view) // PAGE_BYTES * PAGE_BYTES
        done = 0
        while done < whole:
            count = self._try_direct(view[done:whole], offset + done)
            done += count
            if not count or count % PAGE_BYTES:
                return done
        tail = view[whole:]
        if tail and offset + len(view) == self._size and self._write_padded(offset + whole, tail):
            return len(view)
        return done

    def _try_direct(self, data: memoryview | mmap.mmap, offset: int) -> int:
        """0 where memory, place or file system are not fit for direct writes: these bytes go the plain way."""
        try:
            return os.pwrite(self._direct, data, offset)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return 0
            raise

    def _write_padded(self, offset: int, tail: memoryview) -> bool:
        """The last block, padded, and the file cut to its size again: no byte goes through the page cache."""
        with mmap.mmap(-1, PAGE_BYTES) as block:
            block[: len(tail)] = tail
            count = self._try_direct(block, offset)
        if count:
            os.ftruncate(self._descriptor, self._size)
        return count >= len(tail)

    def sync(self) -> None:
        with told("sync", self._path):
            if not _full_sync(self._descriptor):
                getattr(os, "fdatasync", os.fsync)(self._descriptor)
        self._unsynced = 0

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


def _free_bytes(path: str) -> int | str:
    try:
        free = os.statvfs(os.path.dirname(path))
    except OSError:
        return "too few"
    return free.f_bavail * free.f_frsize


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
            raise StorageError(f"{printable(path)} is not a regular file")
        self.size = status.st_size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        done = 0
        with told("read", self._path):
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
