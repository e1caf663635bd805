"""What a forked child must let go of: descriptors that it would keep open after its parent's death."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """Something that a fork copies, though it is the parent's alone."""

    def leave_to_parent(self) -> None:
        """Called in the child: close what was inherited, and change nothing that both share."""
        ...


_open: weakref.WeakSet[Inherited] = weakref.WeakSet()


def let_go_in_children(item: Inherited) -> None:
    """Have ``item`` let go in every child that this process forks from now on."""
    _open.add(item)


def _leave_to_parent() -> None:
    for item in list(_open):
        item.leave_to_parent()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
