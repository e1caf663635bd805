"""Storages that count, fail, hang, stop and lose: for Midstride's own tests, and for yours.

    storage = FaultyStorage(LocalStorage(path), fail_at(7, errno.ENOSPC))
    with pytest.raises(ms.SaveError): ...

A fault of your own is a ``Fault`` with ``before`` or ``after``. The suite that every storage must
pass is ``midstride.testing.contract``; it needs pytest.
"""

from midstride.testing.faulty import (
    Crash,
    Fault,
    FaultyStorage,
    Gate,
    Operation,
    StruckStorage,
    fail_at,
    fail_from,
    kill_at,
    stop_after,
    stop_before,
)
from midstride.testing.volatile import VolatileStorage, materialise

__all__ = [
    "Crash",
    "Fault",
    "FaultyStorage",
    "Gate",
    "Operation",
    "StruckStorage",
    "VolatileStorage",
    "fail_at",
    "fail_from",
    "kill_at",
    "materialise",
    "stop_after",
    "stop_before",
]
