"""Processes of their own, made quickly: one that has imported TensorFlow, and has run nothing of it, is forked for each.

    child = start(work, argument, ...)

runs a function of a module in a new process, which ends as a script does: by its return, an exception, ``sys.exit``, a
signal. Arguments are what JSON can say. TensorFlow has no threads before its first session, so that forking is safe.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

WATCHDOG_SECONDS = 60.0
"""No test depends on this: it only turns what would hang for ever into a failure."""


class Child:
    """A running process, and how it ended."""

    def __init__(self, of: _Forker, pid: int, output: Path) -> None:
        self._of, self.pid, self._output = of, pid, output
        self._returncode: int | None = None

    def send(self, signal_number: int) -> None:
        os.kill(self.pid, signal_number)

    def wait(self) -> int:
        """As ``Popen.wait``: the exit code, or the negative number of the signal."""
        if self._returncode is None:
            status = self._of.ask({"wait": self.pid}, on_timeout=lambda: self.send(signal.SIGKILL))
            self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode

    @property
    def output(self) -> str:
        """Standard output and error together."""
        return self._output.read_text(errors="replace")


class _Forker:
    def __init__(self) -> None:
        self._files = tempfile.TemporaryDirectory()
        self._count = 0
        root = Path(__file__).resolve().parents[3]
        search = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=root,
            env={**os.environ, "PYTHONPATH": search, "PYTHONUNBUFFERED": "1"},
            text=True,
        )
        atexit.register(self._close)

    def _close(self) -> None:
        self._process.stdin.close()
        self._process.wait(WATCHDOG_SECONDS)
        self._process.stdout.close()

    def start(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Child:
        self._count += 1
        output = Path(self._files.name, str(self._count))
        request = {"work": [work.__module__, work.__qualname__], "arguments": arguments, "output": str(output)}
        return Child(self, self.ask(request), output)

    def ask(self, request: Any, on_timeout: Callable[[], None] = lambda: None) -> int:
        print(json.dumps(request), file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], WATCHDOG_SECONDS)[0]:
            on_timeout()
        return int(json.loads(self._process.stdout.readline()))


@functools.cache
def _forker() -> _Forker:
    return _Forker()


def start(work: Callable[..., Any], *arguments: Any) -> Child:
    """Call a module's function in a new process; what it returns is the exit code."""
    return _forker().start(work, tuple(str(a) if isinstance(a, Path) else a for a in arguments))


def run(work: Callable[..., Any], *arguments: Any) -> Child:
    """The same, to its end."""
    child = start(work, *arguments)
    child.wait()
    return child


def _serve() -> Any:
    """Returns only in children: the code to exit with."""
    importlib.import_module("midstride.tensorflow.hook")
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(json.dumps(os.waitpid(request["wait"], 0)[1]), flush=True)
            continue
        module, name = request["work"]
        try:
            work = getattr(importlib.import_module(module), name)
        except BaseException:
            traceback.print_exc()
            raise
        # Else a child's exit would walk through all that was imported: 2 s instead of 0.5.
        gc.collect()
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            nothing = os.open(os.devnull, os.O_RDONLY)
            output = os.open(request["output"], os.O_WRONLY | os.O_CREAT)
            for target, source in ((0, nothing), (1, output), (2, output)):
                os.dup2(source, target)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return work(*request["arguments"])
        print(json.dumps(pid), flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(_serve())
