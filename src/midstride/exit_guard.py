"""At the end of a block or of the interpreter: finish saves in flight, and let no failed one go untold.

``sys.exit()`` or the end of the script must not tear a running save, and a lost last checkpoint
must not look like success. An exception in an ``atexit`` handler leaves the exit code at 0, hence
``os._exit``; it comes in the handler that was registered first, which runs last. Handlers that others
registered before Midstride was first used are not run then; streams and logs are flushed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import Protocol

_log = logging.getLogger("midstride")


class Closable(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_failed = False


def add(item: Closable) -> None:
    """Close ``item`` at exit unless it is discarded before."""
    if not _open:
        # Registered anew for each first item: handlers run last in, first out, and this one must
        # come before those that take away what closing needs.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _open.add(item)


def discard(item: Closable) -> None:
    """``item`` is closed already."""
    _open.discard(item)


def leave(close: Callable[[], None], error: BaseException | None) -> None:
    """End a ``with`` block that ``error`` leaves, or nothing. What ``close`` raises does not hide an error."""
    # sys.exit(0) claims success, so a lost checkpoint must replace it; a generator that is closed ends like a block.
    if error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0)):
        close()
        return
    try:
        close()
    except Exception as failure:  # the caller's own exception must be the one that is seen
        _log.error("while another exception was leaving: %s", failure)
        error.add_note(f"midstride: {type(failure).__name__}: {failure}")


def _close_all() -> None:
    global _failed
    for item in list(_open):
        try:
            item.close()
        except BaseException as error:  # Ctrl-C too: the save was torn off, and that is no success
            _failed = True
            with contextlib.suppress(Exception):
                print(f"midstride: {type(error).__name__}: {error}", file=sys.stderr)


def _exit_code() -> None:
    if not _failed:
        return
    try:
        for flush in (logging.shutdown, *(getattr(s, "flush", None) for s in (sys.stdout, sys.stderr))):
            with contextlib.suppress(Exception):
                if flush is not None:
                    flush()
    finally:
        os._exit(1)


def _forget() -> None:
    global _failed
    _open.clear()
    _failed = False


atexit.register(_exit_code)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # the saves are the parent's
