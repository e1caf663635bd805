"""Which names a storage takes: none that could mean something outside its root."""

from __future__ import annotations

from midstride.errors import StorageError


def check_name(name: str, description: str) -> None:
    """Raise ``StorageError`` unless ``name`` is ``""`` or parts joined by ``/`` that stay below the root.

    A backslash is refused too: on another system the same name would have other parts.
    """
    parts = name.split("/") if name else []
    if "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise StorageError(f"{name!r} is not a name inside {description}. Nothing was opened or changed")
