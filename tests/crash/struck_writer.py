"""A writer process that gets a signal at its n-th message, in or out, or that is broken on purpose."""

from __future__ import annotations

import os
from typing import Any

from midstride.save import writer_process
from midstride.save.writer import Writer

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from tests.crash.struck_writer import main; main(int(sys.argv[4]))"
)
STRIKE = "MIDSTRIDE_TESTS_STRIKE"
"""The number of the message, the signal, and a file that is made when it happens."""
BROKEN = "MIDSTRIDE_TESTS_BROKEN"


def main(descriptor: int) -> None:
    if STRIKE in os.environ:
        _strike(*os.environ[STRIKE].split(" ", 2))
    if os.environ.get(BROKEN) == "adopts nothing":
        Writer._adopting = lambda _, job: job  # type: ignore[method-assign]
    if os.environ.get(BROKEN) == "seals by itself":
        _seal_by_itself()
    if os.environ.get(BROKEN) == "ends at once":
        _end_at_once()
    writer_process.main(descriptor)


def _strike(number: str, signum: str, mark: str) -> None:
    messages = 0

    def counted(method: Any) -> Any:
        def call(trainer: Any, *arguments: Any) -> Any:
            nonlocal messages
            result = method(trainer, *arguments)
            if not any(isinstance(message, writer_process.Alive) for message in arguments):
                messages += 1
                if messages == int(number) and not os.path.exists(mark):
                    open(mark, "x").close()
                    os.kill(os.getpid(), int(signum))
            return result

        return call

    trainer = writer_process._Trainer
    trainer.receive = counted(trainer.receive)  # type: ignore[method-assign]
    trainer.send = counted(trainer.send)  # type: ignore[method-assign]


def _seal_by_itself() -> None:
    """Takes the trainer's death for the end of the snapshot."""
    receive = writer_process._Trainer.receive
    last: list[Any] = []

    def wrong(trainer: Any) -> Any:
        request = receive(trainer)
        if isinstance(request, writer_process.Stop) and trainer.is_dead and last:
            from midstride.save.messages import Seal

            return Seal(last.pop().job)
        last[:] = [request] if hasattr(request, "chunk") else []
        return request

    writer_process._Trainer.receive = wrong  # type: ignore[method-assign]


def _end_at_once() -> None:
    """Ends with the trainer, whatever that has said."""
    receive = writer_process._Trainer.receive

    def wrong(trainer: Any) -> Any:
        request = receive(trainer)
        return writer_process.Stop() if trainer._look() else request

    writer_process._Trainer.receive = wrong  # type: ignore[method-assign]
