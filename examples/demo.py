"""``make demo``: a run that is killed in mid-save ends bit-equal to one that never was; and what saving costs."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_transformer import Training

import midstride as ms

HERE = Path(__file__).parent
RUNS = HERE.parent / "demo-runs"
STEPS, EVERY = 40, 8
MIB = 2**20


def command(run: Path) -> list[str]:
    script = str(HERE / "train_transformer.py")
    return [sys.executable, script, "--run", str(run), "--steps", str(STEPS), "--every", str(EVERY)]


def train_in_child(run: Path) -> None:
    """Train to the end in a process of its own, and show what it says."""
    child = subprocess.run(command(run), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True)
    for line in child.stdout.splitlines():
        print(f"   {line}")


# Killed in mid-save.


def committed_steps(run: Path) -> set[int]:
    return {int(manifest.parent.name.split("-")[1]) for manifest in run.glob("step-*/manifest.json")}


def save_in_progress(run: Path) -> Path | None:
    """The folder that a save is writing, if two checkpoints are committed already.

    A folder without a manifest is newer than every checkpoint when it is being written; an older one is being
    deleted.
    """
    committed = committed_steps(run)
    if len(committed) < 2:
        return None
    for folder in run.glob("step-*"):
        if int(folder.name.split("-")[1]) > max(committed) and not (folder / "manifest.json").exists():
            return folder
    return None


def kill_in_mid_save(run: Path) -> Path | None:
    """Start training and kill it with SIGKILL in the middle of a save; None if it ended before that.

    The process is stopped first and looked at while nothing in it can move, so that the kill cannot be a little late.
    """
    child = subprocess.Popen(command(run), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        while child.poll() is None:
            if save_in_progress(run) is None:
                time.sleep(0.0005)
                continue
            child.send_signal(signal.SIGSTOP)
            _, status = os.waitpid(child.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                return None
            folder = save_in_progress(run)
            if folder is not None:
                child.kill()
                child.wait()
                return folder
            child.send_signal(signal.SIGCONT)
        return None
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def show_folder(run: Path) -> None:
    for folder in sorted(run.glob("step-*")):
        files = [file for file in folder.iterdir() if file.suffix == ".safetensors"]
        size = sum(file.stat().st_size for file in files) / MIB
        whole = (
            "manifest.json: committed" if (folder / "manifest.json").exists() else "no manifest.json: not a checkpoint"
        )
        print(f"   {folder.name}   {len(files)} data files, {size:.1f} MiB   {whole}")


def finished(run: Path, folder: Path) -> bool:
    """Whether the writer that the dead trainer left has committed the checkpoint; waits for its end."""
    storage = ms.LocalStorage(run)
    while storage.left_at(".lock") is not None:
        time.sleep(0.01)
    return (folder / "manifest.json").exists()


# Bit for bit.


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every array and every plain value of a loaded state, with where it stands."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from leaves(child, f"{place}/{key}")
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from leaves(child, f"{place}/{index}")
    else:
        yield place, value


def same(one: Any, other: Any) -> bool:
    if not isinstance(one, np.ndarray):
        return type(one) is type(other) and repr(one) == repr(other)
    return (
        isinstance(other, np.ndarray)
        and (one.dtype, one.shape) == (other.dtype, other.shape)
        and one.tobytes() == other.tobytes()
    )


def compare(run: Path, other_run: Path) -> bool:
    """Print whether the last states of two runs are equal in every bit."""
    one, other = (dict(leaves(ms.open(folder).load(step=STEPS))) for folder in (run, other_run))
    different = [
        place
        for place in {**one, **other}
        if place not in one or place not in other or not same(one[place], other[place])
    ]
    arrays = [value for value in one.values() if isinstance(value, np.ndarray)]
    size = sum(array.nbytes for array in arrays) / MIB
    print(
        f"   {len(arrays)} arrays ({size:.1f} MiB) and {len(one) - len(arrays)} plain values compared at step {STEPS}"
    )
    print(f"   DIFFERENT: {', '.join(sorted(different))}" if different else "   bit-equal")
    return not different


# What saving costs.

ROUNDS, ROUND_STEPS, SAVE_EVERY = 5, 8, 4


class Cost:
    """Seconds of the loops, and of each call that saved, of one way to save."""

    def __init__(self, name: str, save: Callable[[int], object], finish: Callable[[], object], durable: str) -> None:
        self.name, self.durable = name, durable
        self._save, self._finish = save, finish
        self.loops: list[float] = []
        self.calls: list[float] = []

    def loop(self, training: Training, first: int) -> None:
        began = time.perf_counter()
        for step in range(first, first + ROUND_STEPS):
            training.train_one()
            if step % SAVE_EVERY == 1:  # so that training goes on after each save
                called = time.perf_counter()
                self._save(step)
                self.calls.append(time.perf_counter() - called)
        self._finish()
        self.loops.append(time.perf_counter() - began)


def torch_save(training: Training, folder: Path, *, sync: bool) -> None:
    """Save as people do by hand; with ``sync`` to a new file that takes the old one's place once it is durable."""
    plain = {name: item.state_dict() for name, item in training.state().items()}
    if not sync:
        torch.save(plain, folder / "peer.pt")
        return
    with open(folder / "peer.pt.tmp", "wb") as file:
        torch.save(plain, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "peer.pt.tmp", folder / "peer.pt")
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def measure(folder: Path) -> list[Cost]:
    """The ways take turns, so that a slow moment of the machine hits all of them."""
    training = Training(STEPS)
    folder.mkdir(parents=True)
    state = training.state()
    with ms.Checkpointer(folder / "midstride", keep=1) as ckpt:
        costs = [
            Cost("no checkpoints", lambda step: None, lambda: None, ""),
            Cost("midstride", lambda step: ckpt.save(step, state), ckpt.wait, "yes"),
            Cost("torch.save", lambda step: torch_save(training, folder, sync=False), lambda: None, "no"),
            Cost("torch.save + fsync", lambda step: torch_save(training, folder, sync=True), lambda: None, "yes"),
        ]
        for number in range(ROUNDS + 1):
            for cost in costs:
                cost.loop(training, 1 + number * ROUND_STEPS)
                if number == 0:  # the first loops warm memory and caches up
                    cost.loops.clear()
                    cost.calls.clear()
    return costs


def show_costs(costs: list[Cost]) -> None:
    base = min(costs[0].loops)
    print(f"   {'':20}{'a saving call':>16}{'loop':>10}{'slowdown':>11}   durable")
    for cost in costs:
        call = f"{statistics.median(cost.calls) * 1000:.1f} ms" if cost.durable else ""
        loop = min(cost.loops)
        slowdown = f"{(loop / base - 1) * 100:+.0f} %" if cost.durable else ""
        print(f"   {cost.name:20}{call:>16}{loop:>8.2f} s{slowdown:>11}   {cost.durable}")


def main() -> int:
    shutil.rmtree(RUNS, ignore_errors=True)
    whole, broken = RUNS / "uninterrupted", RUNS / "killed"

    print(
        f"1. A small transformer is trained for {STEPS} steps, with a checkpoint every {EVERY}, and never interrupted."
    )
    train_in_child(whole)

    print("\n2. The same again, killed with SIGKILL in the middle of a save.")
    for _ in range(5):
        folder = kill_in_mid_save(broken)
        if folder is not None:
            break
        print("   it ended before a save was caught in the act; once more")
        shutil.rmtree(broken)
    else:
        print("   no save could be caught in the act")
        return 1
    became = "staged whole: committed" if finished(broken, folder) else "not staged whole: dropped"
    print(f"   killed while {folder.name} was written. The writer, a process of its own, lived on;")
    print(f"   that snapshot was {became}. What is on disk:")
    show_folder(broken)

    print("\n3. Started again, in a new process, with the same command.")
    train_in_child(broken)

    print("\n4. The two runs' last states, read back and checked:")
    if not compare(whole, broken):
        return 1

    print(f"\n5. What saving costs this model, when every {SAVE_EVERY}th step saves:")
    show_costs(measure(RUNS / "cost"))
    shutil.rmtree(RUNS / "cost")
    print(
        f"   A call: the median. A loop of {ROUND_STEPS} steps, till its last save has ended: the quickest of {ROUNDS}."
    )
    print("\nThe checkpoints are still there: .venv/bin/midstride ls demo-runs/killed")
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(main())
