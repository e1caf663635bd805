"""What a save and a restore cost beside the floors of the machine, training idle.

    python benchmarks/bench_core.py            1.2 GiB of parameters and AdamW state, and 10,000 arrays of 10 KB
    python benchmarks/bench_core.py --quick    small sizes; asserts counts and bytes, never time

Floors and Midstride take turns in one run, so that a slow moment of the machine hits both. Each
figure is the median of the repetitions, with the least and the most behind it. "Durable" is bytes
and names on stable storage; "buffered" is what the page cache says it has.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from processes import pss_bytes

import midstride as ms
from midstride.limits import CHUNK_BYTES, PAGE_BYTES

MIB = 2**20
Times = dict[str, list[float]]


def parameters_and_adamw(total_bytes: int) -> dict[str, Any]:
    """A stack of linear layers and its AdamW optimizer after one step: three tensors a parameter."""
    torch.manual_seed(0)
    width = 1024 if total_bytes >= 256 * MIB else 128
    layers = max(1, total_bytes // (3 * 4 * width * (width * 4 + 4)))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width * 4) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def tensors_of(state: Any) -> list[torch.Tensor]:
    """Every tensor of a state of modules, optimizers and dicts."""
    if isinstance(state, torch.Tensor):
        return [state.detach()]
    if hasattr(state, "state_dict"):
        return tensors_of(state.state_dict())
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for child in children for tensor in tensors_of(child)]


def timed(times: Times, name: str, action: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = action()
    times.setdefault(name, []).append(time.perf_counter() - began)
    return result


class Floors:
    """The least that the same bytes can cost: a warm copy, a direct write with fsync, a direct read."""

    def __init__(self, tensors: list[torch.Tensor], folder: Path) -> None:
        self._tensors = [t for t in tensors if t.numel()]
        self.nbytes = sum(t.numel() * t.element_size() for t in self._tensors)
        self._file = folder / "raw"
        size = -(-self.nbytes // PAGE_BYTES) * PAGE_BYTES
        self._buffer = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self._buffer[:] = 1
        target, offset = torch.from_numpy(self._buffer), 0
        self._views = []
        for tensor in sorted(self._tensors, key=lambda t: -t.element_size()):
            end = offset + tensor.numel() * tensor.element_size()
            self._views.append((target[offset:end].view(tensor.dtype).view(tensor.shape), tensor))
            offset = end

    def copy(self) -> None:
        torch._foreach_copy_([view for view, _ in self._views], [tensor for _, tensor in self._views])

    def clear(self) -> None:
        """Before each write, untimed: giving the blocks of the one before back takes a quarter of a second."""
        self._file.unlink(missing_ok=True)

    def write(self) -> None:
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        os.posix_fallocate(descriptor, 0, self._buffer.size)
        for offset in range(0, self._buffer.size, CHUNK_BYTES):
            os.pwrite(descriptor, memoryview(self._buffer[offset : offset + CHUNK_BYTES]), offset)
        os.fsync(descriptor)
        os.close(descriptor)

    def read(self) -> None:
        descriptor = os.open(self._file, os.O_RDONLY | os.O_DIRECT)
        for offset in range(0, self._buffer.size, CHUNK_BYTES):
            os.preadv(descriptor, [memoryview(self._buffer[offset : offset + CHUNK_BYTES])], offset)
        os.close(descriptor)


def forget_cached(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Peak:
    """Highest memory (PSS) of this process and what it started while in the block, above that when this was made."""

    def __init__(self) -> None:
        self._before = self._highest = pss_bytes(os.getpid())

    def __enter__(self) -> Peak:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.1):  # a look takes up to 20 ms of a core
            self._look()

    def _look(self) -> None:
        self._highest = max(self._highest, pss_bytes(os.getpid()))

    def __exit__(self, *_: object) -> None:
        self._look()
        self._stop.set()
        self._thread.join()
        self.above_bytes = self._highest - self._before


def bench(state: Any, fresh: Callable[[], Any], folder: Path, repeats: int) -> tuple[Times, dict[str, float | str]]:
    """Interleaved repetitions of floors and of Midstride on one state; times in seconds."""
    times: Times = {}
    figures: dict[str, float | str] = {}
    floors = Floors(tensors_of(state), folder)
    run = folder / "run"
    floors.copy()
    peak = Peak()  # the writer's process is part of what is above it
    with ms.Checkpointer(run, keep=1) as ckpt:
        with peak:
            ckpt.save(0, state).result()
        figures["first save: stall, cold memory (s)"] = ckpt.statistics().last_stall_seconds or 0.0
        figures["memory beside the state (MiB)"] = peak.above_bytes / MIB
        for number in range(1, repeats + 1):
            timed(times, "floor: warm memcpy", floors.copy)
            began = time.perf_counter()
            pending = ckpt.save(number, state)
            times.setdefault("midstride: stall of save()", []).append(time.perf_counter() - began)
            pending.result()
            times.setdefault("midstride: call to durable", []).append(time.perf_counter() - began)
            ckpt.wait()  # the older one is deleted now, which the floor must not feel
            times.setdefault("midstride: until the older one is deleted", []).append(time.perf_counter() - began)
            floors.clear()
            timed(times, "floor: direct write + fsync", floors.write)
            _peers_save(times, state, folder)
        saved = ckpt.statistics()
    for _ in range(repeats):
        target = fresh()
        forget_cached(folder)
        timed(times, "floor: direct read", floors.read)
        forget_cached(folder)
        timed(times, "midstride: cold verified restore", lambda target=target: ms.Checkpointer(run).restore(target))
        forget_cached(folder)
        timed(times, "torch.load, cold, not verified", lambda: torch.load(folder / "peer.pt", weights_only=True))
    figures["state (MiB)"] = floors.nbytes / MIB
    figures["arrays"] = len(tensors_of(state))
    figures["engine: the writer is a"] = saved.engine or "?"
    assert saved.saves_committed == repeats + 1
    assert saved.bytes_committed >= floors.nbytes * (repeats + 1)
    return times, figures


def _peers_save(times: Times, state: Any, folder: Path) -> None:
    plain = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()}
    path = folder / "peer.pt"
    timed(times, "torch.save, buffered", lambda: torch.save(plain, path))
    descriptor = os.open(path, os.O_RDONLY)
    timed(times, "torch.save, its fsync", lambda: os.fsync(descriptor))
    os.close(descriptor)


def report(title: str, times: Times, figures: dict[str, float | str]) -> str:
    middle = {name: statistics.median(values) for name, values in times.items()}
    lines = [f"## {title}", "", "| | median s | least | most | beside its floor |", "|---|---|---|---|---|"]
    floors = {
        "midstride: stall of save()": "floor: warm memcpy",
        "midstride: call to durable": "floor: direct write + fsync",
        "midstride: cold verified restore": "floor: direct read",
    }
    for name, values in times.items():
        floor = floors.get(name)
        ratio = f"{middle[name] / middle[floor]:.2f} x" if floor else ""
        lines.append(f"| {name} | {middle[name]:.3f} | {min(values):.3f} | {max(values):.3f} | {ratio} |")
    said = {name: value if isinstance(value, str) else f"{value:.3f}" for name, value in figures.items()}
    lines += ["", *(f"- {name}: {value}" for name, value in said.items()), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    total, small, repeats = (8 * MIB, 200, 2) if arguments.quick else (1229 * MIB, 10_000, arguments.repeats)
    folder = Path(tempfile.mkdtemp(prefix="midstride-bench-", dir=arguments.folder))
    versions = {
        "midstride": ms.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": str(os.cpu_count()),
    }
    results: dict[str, Any] = {"versions": versions}
    text = ["# Midstride beside its floors", "", ", ".join(f"{k} {v}" for k, v in versions.items()), ""]
    cases: dict[str, tuple[Callable[[], Any], Path]] = {
        "parameters and AdamW state": (lambda: parameters_and_adamw(total), folder / "adamw"),
        f"{small} arrays of 10 KB": (lambda: {"arrays": many_small(small)}, folder / "small"),
    }
    try:
        for title, (make, place) in cases.items():
            place.mkdir(parents=True)
            times, figures = bench(make(), make, place, repeats)
            results[title] = {"seconds": times, "figures": figures}
            text.append(report(title, times, figures))
            shutil.rmtree(place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(text))
    if not arguments.quick:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "core.json").write_text(json.dumps(results, indent=1))
        (arguments.out / "core.md").write_text("\n".join(text))
    sys.exit(0)


def many_small(count: int) -> dict[str, torch.Tensor]:
    """Distinct tensors of 10 KB."""
    return {f"layer{n}": torch.full((2560,), float(n)) for n in range(count)}


if __name__ == "__main__":
    main()
