"""Staging memory is not used again before the write that reads from it has ended or was given up.

With several saves one after the other on a slow disk, all are bit exact; also when one of them fails
and is saved again. One save is in flight at a time: the next ``save()`` waits for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import WatchedWrites, values_in
from hooked import data_of

import midstride as ms
from midstride.errors import NoSpace, WriteError
from midstride.storage import open_storage

SMALL = 256 * 1024
"""A quarter of the state: pieces are used several times in one save."""


def _state(value: int) -> dict[str, Any]:
    return {"model": {f"w{n}": np.full(32 * 1024, value, np.float32) for n in range(8)}}


@pytest.mark.parametrize("staging_bytes", [None, SMALL])
def test_three_saves_on_a_slow_disk(tmp_path: Path, staging_bytes: int | None) -> None:
    storage = WatchedWrites(open_storage(tmp_path), lambda operation, name: None)
    with ms.Checkpointer(storage, staging_bytes=staging_bytes) as ckpt:
        held = set()
        for step in (1, 2, 3):
            ckpt.save(step, _state(step))
            held.add(ckpt.statistics().staging_bytes)
        assert len(held) == 1, "the same memory serves every save"
        assert held.pop() <= (staging_bytes or 2**20 + 2**16)
    assert storage.changed == []
    assert storage.writes >= 3
    for step in (1, 2, 3):
        assert values_in(ms.open(tmp_path).load(step)) == {step}


@pytest.mark.parametrize("staging_bytes", [None, SMALL])
def test_failed_save_is_taken_again(tmp_path: Path, staging_bytes: int | None) -> None:
    failed: list[str] = []

    def fail_once(operation: str, name: str) -> None:
        if operation == "create_file" and name.startswith(data_of(1)) and not failed:
            failed.append(name)
            raise NoSpace("injected")

    storage = WatchedWrites(open_storage(tmp_path), fail_once)
    with ms.Checkpointer(storage, staging_bytes=staging_bytes, max_failures=1) as ckpt:
        first = ckpt.save(1, _state(1))
        ckpt.save(2, _state(2))
        with pytest.raises(WriteError, match="step 1 "):
            first.result()
        ckpt.save(1, _state(1))  # while 2 is in flight
        ckpt.save(3, _state(3))
    assert failed
    assert storage.changed == []
    for step in (1, 2, 3):
        assert values_in(ms.open(tmp_path).load(step)) == {step}
    assert not any(problems for problems in ms.open(tmp_path).verify().values())
