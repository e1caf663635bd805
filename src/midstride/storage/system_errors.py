"""The operating system's errors in the library's own, by one table."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from midstride.errors import NoSpace, NotFound, PermissionDenied, StorageError, Unavailable

_ERRORS: dict[int, type[StorageError]] = {
    errno.ENOENT: NotFound,
    errno.ENOTDIR: NotFound,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EFBIG: NoSpace,
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
    errno.EROFS: PermissionDenied,
    errno.EEXIST: StorageError,
    errno.ENOTEMPTY: StorageError,
    errno.EISDIR: StorageError,
    errno.ELOOP: StorageError,
    errno.ENAMETOOLONG: StorageError,
}
"""What each errno means to a caller; any other is ``Unavailable``, and may be over when it is tried again."""


def storage_error(error: OSError, what: str, path: str) -> StorageError:
    """The library's error for the operating system's: what was tried, where, and what came of it."""
    kind = _ERRORS.get(error.errno or 0, Unavailable)
    return kind(f"{what} {printable(path)}: {error.strerror or error}")


@contextmanager
def told(what: str, path: str) -> Iterator[None]:
    """Let no bare ``OSError`` out."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, what, path) from error


def printable(path: str | os.PathLike[str]) -> str:
    """A path that any stream can print: bytes that are no text come as ``\\udc..`` escapes."""
    return os.fspath(path).encode("utf-8", "backslashreplace").decode()
