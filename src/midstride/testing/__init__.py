"""Storages that count, fail, stop and lose: for Midstride's own tests, and for yours.

storage = FaultyStorage(LocalStorage(path), fail_at(7, errno.ENOSPC))
with pytest.raises(ms.SaveError): ...
"""

from midstride.testing.faulty import (
    Crash,
    FaultyStorage,
    Operation,
    fail_at,
    fail_from,
    kill_at,
    stop_after,
    stop_before,
)
from midstride.testing.volatile import VolatileStorage, materialise

__all__ = [
    "Crash",
    "FaultyStorage",
    "Operation",
    "VolatileStorage",
    "fail_at",
    "fail_from",
    "kill_at",
    "materialise",
    "stop_after",
    "stop_before",
]
