"""Kills a run at every operation with a real SIGKILL, on a real folder; then restores in a new process.

    python -m tests.crash.zygote RUN FOLDER [BROKEN]

Forks a process for each run and one for each restore, so that Python starts but once. Prints a line
of JSON for each operation: what was said to be saved before the kill, and what is wrong after it.
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


def killed_run(run: Callable[..., None], folder: Path, number: int, told: Path) -> None:
    class Said(list):  # type: ignore[type-arg]
        def append(self, item: Any) -> None:  # written at once: the list itself dies with the process
            super().append(item)
            draft = told.with_suffix(".draft")
            draft.write_text(json.dumps(self))
            draft.replace(told)  # the kill may come from the writer's thread in the middle of this

    run(FaultyStorage(ms.LocalStorage(folder), kill_at(number)), Said())


def after(folder: Path, said: Acknowledged) -> dict[str, list[str]]:
    storage = ms.LocalStorage(folder)
    wrong = problems(storage, said)
    with ms.Checkpointer(folder) as ckpt:
        ckpt.restore()
        ckpt.save(9, state_of(9)).result()
    return {"wrong": wrong, "left": leftovers(storage)}


def main() -> None:
    run, base = RUNS[sys.argv[1]], Path(sys.argv[2])
    for number in range(1, 10_000):
        folder, told = base / "run", base / "said"
        shutil.rmtree(base, ignore_errors=True)
        base.mkdir()
        status, _ = in_child(lambda n=number, f=folder, t=told: killed_run(run, f, n, t))  # type: ignore[misc]
        said = [tuple(item) for item in json.loads(told.read_text())] if told.exists() else []
        code, text = in_child(lambda f=folder, s=said: after(f, s))  # type: ignore[misc]
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print(json.dumps({"killed": killed, "said": said, "ended": code, **json.loads(text or "{}")}), flush=True)
        if not killed:
            return


if __name__ == "__main__":
    main()
