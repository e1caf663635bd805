"""Kills a run at every operation with a real SIGKILL, on a real folder; then restores in a new process.

    python -m tests.crash.zygote RUN FOLDER [BROKEN]

Forks a process for each run and one for each restore, so that Python starts but once. Prints a line
of JSON for each operation: what was said to be saved before the kill, and what is wrong after it.
With the name of a broken variant (``broken.KILLS``) it goes from the last operation to the first, and
ends as soon as something is wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import midstride as ms
from midstride.testing import FaultyStorage, kill_at
from tests.crash.broken import KILLS, in_force
from tests.crash.runs import RUNS, Acknowledged, leftovers, problems, state_of


def in_child(work: Callable[[], Any]) -> tuple[int, str]:
    """Run ``work`` in a forked process; its exit status and what it returned, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writer, json.dumps(work()).encode())
            code = 0
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    return os.waitpid(child, 0)[1], text


def killed_run(run: Callable[..., None], folder: Path, number: int, told: Path, wrap: Callable[..., Any]) -> int:
    class Said(list):  # type: ignore[type-arg]
        def append(self, item: Any) -> None:  # written at once: the list itself dies with the process
            super().append(item)
            draft = told.with_suffix(".draft")
            draft.write_text(json.dumps(self))
            draft.replace(told)  # the kill may come from the writer's thread in the middle of this

    storage = FaultyStorage(ms.LocalStorage(folder), kill_at(number))
    run(wrap(storage), Said())
    return len(storage.operations)


def after(folder: Path, said: Acknowledged) -> dict[str, list[str]]:
    storage = ms.LocalStorage(folder)
    wrong = problems(storage, said)
    try:
        with ms.Checkpointer(folder, engine="thread") as ckpt:
            ckpt.restore()
            ckpt.save(9, state_of(9)).result()
    except ms.MidstrideError as error:
        wrong.append(f"the next run failed: {error!r}")
    return {"wrong": wrong, "left": leftovers(storage)}


def killed_at(run: Callable[..., None], base: Path, number: int, wrap: Callable[..., Any]) -> dict[str, Any]:
    """What came of a run that was killed at an operation: what it said, what is wrong after it."""
    folder, told = base / "run", base / "said"
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    status, count = in_child(lambda: killed_run(run, folder, number, told, wrap))
    said = [tuple(item) for item in json.loads(told.read_text())] if told.exists() else []
    ended, text = in_child(lambda: after(folder, said))
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return {
        "killed": killed, "operations": int(count or 0), "said": said, "ended": ended, "wrong": [], "left": [],
        **json.loads(text or "{}"),
    }  # fmt: skip


def main() -> None:
    run, base = RUNS[sys.argv[1]], Path(sys.argv[2])
    if len(sys.argv) > 3:
        with in_force(KILLS[sys.argv[3]][1]) as wrap:
            count = killed_at(run, base, 0, wrap)["operations"]
            # Backwards: what is retired or replaced is so at the end of a run.
            for number in range(count, 0, -1):
                row = killed_at(run, base, number, wrap)
                print(json.dumps(row), flush=True)
                if row["wrong"] or row["left"]:
                    return
        return
    for number in range(1, 10_000):
        row = killed_at(run, base, number, lambda storage: storage)
        print(json.dumps(row), flush=True)
        if not row["killed"]:
            return


if __name__ == "__main__":
    main()
