"""One PyTorch training loop with one way of saving, measured, in a process of its own.

``bench_training.py`` starts it. Its argument is a ``Task`` as JSON; the last line that it prints is what it measured.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_core import forget_cached
from discarding import DiscardingStorage
from processes import cpu_seconds

import midstride as ms

SETTLE_SECONDS = 10.0
"""How long after a way says that it has ended its last save it may take to say when."""


@dataclass(frozen=True)
class Task:
    """What to run. A save is due at every ``every``-th step, or, with ``seconds``, when so much time has passed."""

    way: str
    folder: str
    width: int
    layers: int
    tokens: int
    threads: int
    warm_steps: int
    steps: int
    every: int
    seconds: float | None = None


@dataclass
class Measured:
    """Of the steps after the warm ones. Times in seconds."""

    way: str
    synced: bool
    state_bytes: int = 0
    arrays: int = 0
    step_seconds: list[float] = field(default_factory=list)
    call_seconds: list[float] = field(default_factory=list)
    """What each save held the loop up for, with the wait for the one before it."""
    durable_seconds: list[float] = field(default_factory=list)
    """From each call until the bytes were where the way says they are."""
    loop_seconds: float = 0.0
    last_wait_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of the loop and the wait for the last save, all processes."""
    saves: int = 0
    """That were committed."""
    checkpoint_bytes: int = 0
    """Of the data files of the last checkpoint together."""
    restore_cold_seconds: float | None = None
    restore_warm_seconds: float | None = None
    restored_equal: bool | None = None
    flipped_bit_noticed: bool | None = None


class Model(torch.nn.Module):
    """A transformer's encoder layers, no embedding: what it computes does not matter, how much does."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(value)
        return result


class Training:
    """The model, its optimizer, and a step."""

    def __init__(self, task: Task) -> None:
        torch.manual_seed(0)
        self.model = Model(task.width, task.layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._batch = torch.randn(4, max(1, task.tokens // 4), task.width)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def plain(self) -> dict[str, Any]:
        return {name: item.state_dict() for name, item in self.state.items()}

    @property
    def flat(self) -> dict[str, torch.Tensor]:
        """Every tensor by a name of its own."""
        named = {name: tensor for name, tensor in self.model.named_parameters()}
        names = {id(parameter): name for name, parameter in named.items()}
        moments = {
            f"optimizer.{names[id(parameter)]}.{key}": value
            for parameter, values in self.optimizer.state.items()
            for key, value in values.items()
        }
        return {f"model.{name}": tensor.detach() for name, tensor in named.items()} | moments


# The ways of saving.


class Way:
    """Saves and restores. ``done`` gets the time of each save that is where this way says."""

    synced = False

    def __init__(self, task: Task, training: Training) -> None:
        self.folder, self.training = Path(task.folder), training
        self.done: list[float] = []

    def save(self, step: int) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...

    def restore(self, fresh: Training) -> None:
        raise NotImplementedError

    def committed(self) -> int:
        """How many saves are where this way says."""
        return len(self.done)

    def data_files(self) -> list[Path]:
        """Of the last checkpoint, the largest first; without what describes them."""
        files = (p for p in self.last().rglob("*") if p.is_file() and p.suffix != ".json" and p.name[0] != ".")
        return sorted(files, key=lambda p: -p.stat().st_size)

    def last(self) -> Path:
        """The folder of the last checkpoint."""
        return self.folder

    @property
    def is_restorable(self) -> bool:
        return type(self).restore is not Way.restore


class BareWriter(Way):
    synced = True

    def __init__(self, task: Task, training: Training) -> None:
        super().__init__(task, training)
        nbytes = sum(tensor.nbytes for tensor in training.flat.values())
        command = [sys.executable, str(Path(__file__).parent / "bare_writer.py"), task.folder, str(nbytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._running = 0
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def save(self, step: int) -> None:
        self.wait()
        assert self._process.stdin is not None
        self._process.stdin.write("write\n")
        self._process.stdin.flush()
        self._running = 1

    def wait(self) -> None:
        if self._running:
            self.done.append(float(self._line()))
            self._running = 0

    def close(self) -> None:
        self._process.communicate()


class Midstride(Way):
    synced = True
    engine: Any = "process"

    def __init__(self, task: Task, training: Training) -> None:
        super().__init__(task, training)

        class Told(ms.Listener):
            def after_save(this, event: Any) -> None:
                self.done.append(time.perf_counter())

        self._ckpt = ms.Checkpointer(self.storage(), keep=2, engine=self.engine, listeners=[Told()])
        self._state = training.state

    def storage(self) -> ms.LocalStorage:
        return ms.LocalStorage(self.folder / "run")

    def save(self, step: int) -> None:
        self._ckpt.save(step, self._state)

    def wait(self) -> None:
        self._ckpt.wait()

    def committed(self) -> int:
        now = self._ckpt.statistics()
        assert now.engine in (None, self.engine), f"the engine is {now.engine}"
        return now.saves_committed

    def close(self) -> None:
        self._ckpt.close()

    def last(self) -> Path:
        latest = ms.open(self.storage()).latest()
        assert latest is not None
        return self.folder / "run" / latest.name

    def restore(self, fresh: Training) -> None:
        with ms.Checkpointer(self.storage(), fallback=False, engine="thread") as ckpt:
            ckpt.restore(fresh.state)


class MidstrideThread(Midstride):
    engine = "thread"


class MidstrideDiscarding(Midstride):
    synced = False

    def storage(self) -> ms.LocalStorage:
        return DiscardingStorage(self.folder / "run")

    @property
    def is_restorable(self) -> bool:
        return False


class TorchSave(Way):
    def save(self, step: int) -> None:
        torch.save(self.training.plain, self.folder / "state.pt")
        self.done.append(time.perf_counter())

    def restore(self, fresh: Training) -> None:
        loaded = torch.load(self.folder / "state.pt", weights_only=True)
        for name, item in fresh.state.items():
            item.load_state_dict(loaded[name])


class Safetensors(Way):
    def save(self, step: int) -> None:
        from safetensors.torch import save_file

        save_file(self.training.flat, self.folder / "state.safetensors")
        self.done.append(time.perf_counter())

    def restore(self, fresh: Training) -> None:
        from safetensors.torch import load_file

        loaded = load_file(self.folder / "state.safetensors")
        with torch.no_grad():
            for name, tensor in fresh.flat.items():
                tensor.copy_(loaded[name])


class DcpAsync(Way):
    """PyTorch's own, with the stager that keeps its memory; it syncs its files, not their names."""

    synced = True
    kind = "THREAD"

    def __init__(self, task: Task, training: Training) -> None:
        super().__init__(task, training)
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo", rank=0, world_size=1)
        process = self.kind == "PROCESS"
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=process,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._dcp, self._dist = dcp, dist
        self._options: dict[str, Any] = {
            "async_checkpointer_type": AsyncCheckpointerType[self.kind],
            "async_stager": DefaultStager(options),
        }
        self._future: Any = None
        self._number = 0

    def save(self, step: int) -> None:
        self.wait()
        self._number += 1
        answer = self._dcp.async_save(self.training.plain, checkpoint_id=str(self.last()), **self._options)
        self._future = getattr(answer, "upload_completion", answer)
        self._future.add_done_callback(lambda _: self.done.append(time.perf_counter()))

    def last(self) -> Path:
        return self.folder / f"dcp-{self._number % 2}"

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None

    def close(self) -> None:
        self.wait()
        with contextlib.suppress(Exception):
            self._options["async_stager"].close()

    def restore(self, fresh: Training) -> None:
        state = fresh.plain
        self._dcp.load(state, checkpoint_id=str(self.last()))
        for name, item in fresh.state.items():
            item.load_state_dict(state[name])


class DcpProcess(DcpAsync):
    kind = "PROCESS"

    def close(self) -> None:
        super().close()
        for child in multiprocessing.active_children():
            # Nobody waits for it otherwise, and what it used would count as other processes'.
            child.terminate()
            child.join()


WAYS: dict[str, type[Way]] = {
    "none": Way,
    "bare writer": BareWriter,
    "midstride, process": Midstride,
    "midstride, thread": MidstrideThread,
    "midstride, discarding": MidstrideDiscarding,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "DCP async, thread": DcpAsync,
    "DCP async, process": DcpProcess,
}


# The loop.


def measure(task: Task) -> Measured:
    torch.set_num_threads(task.threads)
    training = Training(task)
    training.step()  # now the optimizer has its state
    way = WAYS[task.way](task, training)
    measured = Measured(task.way, way.synced)
    measured.state_bytes = sum(tensor.nbytes for tensor in training.flat.values())
    measured.arrays = len(training.flat)
    for number in range(task.warm_steps):
        training.step()
        if number == 0:
            way.save(number)  # the first save pays for what is kept
        way.wait()
    warm = 0 if task.way == "none" else 1
    settle(way, warm)
    called = run_loop(task, measured, training, way)
    settle(way, warm + len(called))
    measured.durable_seconds = [done - call for call, done in zip(called, way.done[warm:], strict=True)]
    measured.saves = way.committed() - warm
    assert measured.saves == len(called), f"{measured.saves} of {len(called)} saves were committed"
    if task.way != "none" and way.is_restorable:
        restore(task, measured, training, way)
    way.close()
    return measured


def settle(way: Way, count: int) -> None:
    """Wait until the way has told when it had done so many saves, since it was made."""
    deadline = time.perf_counter() + SETTLE_SECONDS
    while len(way.done) < count and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert len(way.done) == count, f"{len(way.done)} of {count} saves were done"


def run_loop(task: Task, measured: Measured, training: Training, way: Way) -> list[float]:
    """Train and save; return when each save was called."""
    called: list[float] = []
    print("measuring", flush=True)  # from here on the parent looks at our memory
    cpu, began = cpu_seconds(os.getpid()), time.perf_counter()
    last = began
    for number in range(1, task.steps + 1):
        step_began = time.perf_counter()
        training.step()
        now = time.perf_counter()
        due = number % task.every == 0 if task.seconds is None else now - last >= task.seconds
        if due and task.way != "none":
            way.save(task.warm_steps + number)
            last = now
            called.append(now)
            measured.call_seconds.append(time.perf_counter() - now)
        measured.step_seconds.append(time.perf_counter() - step_began)
    trained = time.perf_counter()
    way.wait()
    measured.loop_seconds, measured.last_wait_seconds = trained - began, time.perf_counter() - trained
    measured.cpu_seconds = cpu_seconds(os.getpid()) - cpu
    print("measured", flush=True)
    return called


def restore(task: Task, measured: Measured, training: Training, way: Way) -> None:
    """The last state, cold and warm, compared with what was saved; then with a bit flipped."""
    way.save(task.warm_steps + task.steps + 1)
    way.wait()
    measured.checkpoint_bytes = sum(path.stat().st_size for path in way.data_files())
    fresh = Training(task)
    fresh.step()

    def timed() -> float:
        began = time.perf_counter()
        way.restore(fresh)
        return time.perf_counter() - began

    timed()  # into memory that is there
    forget_cached(way.folder)
    measured.restore_cold_seconds = timed()
    measured.restore_warm_seconds = timed()
    measured.restored_equal = all(torch.equal(one, fresh.flat[name]) for name, one in training.flat.items())
    path = way.data_files()[0]
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    try:
        way.restore(fresh)
        measured.flipped_bit_noticed = False
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # DCP's CheckpointException is not an Exception
        measured.flipped_bit_noticed = True


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    status = 0
    try:
        print(json.dumps(asdict(measure(task))), flush=True)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # threads of some ways would stay


if __name__ == "__main__":
    main()
