"""At the interpreter's exit: finish saves in flight, and end non-zero if one failed and nobody was told.

``sys.exit()`` or the end of the script must not tear a running save, and a lost last checkpoint
must not look like success. An exception in an ``atexit`` handler leaves the exit code at 0, hence
``os._exit``; it comes in the handler that was registered first, which runs last.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import weakref
from typing import Protocol


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
