"""What checkpoints cost a TensorFlow loop that keeps both cores busy: ours, TensorFlow's, none, and the bare writer.

    python benchmarks/bench_tensorflow.py            1.2 GiB of resource variables with Adam, a save at every third step
    python benchmarks/bench_tensorflow.py --quick    small sizes; asserts counts and bytes, never time

Each repetition of each way is a process of its own (``tensorflow_loop.py``), in rounds (``rounds.py``). Each slowdown
is against the loop without checkpoints of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from machine import MIB
from rounds import pairs, run_loop, run_rounds, spread, table, unavailable, void_attempts

HERE = Path(__file__).parent
BASE = "none"
WAYS = [BASE, "bare writer", "plain hook", "old hook", "ours", "ours, copy", "ours, held"]
ABOUT = {
    BASE: "no checkpoints",
    "bare writer": "another process writes as many bytes at the same moments, O_DIRECT and fsync, no copy, no digest",
    "plain hook": "TensorFlow's `CheckpointSaverHook`",
    "old hook": "an imitation of TensorFlow's former asynchronous hook, with its faults",
    "ours": '`AsyncCheckpointSaverHook`, `snapshot="auto"`',
    "ours, copy": 'the same with `snapshot="copy"`',
    "ours, held": "the same without the worker's copy of what the snapshot holds: each update makes its own",
}
TRIGGER_GOAL, SLOWDOWN_GOAL = 0.2, 48.0
"""The trigger beside a warm copy of the same bytes; per cent."""


@dataclass(frozen=True)
class Sizes:
    width: int
    layers: int
    batch: int
    warm_steps: int = 5  # so that each save in the window is followed by two steps
    steps: int = 18
    every: int = 3

    @property
    def nbytes(self) -> int:
        return 3 * 4 * self.layers * (self.width + 1) * self.width


FULL = Sizes(width=2048, layers=25, batch=256)
QUICK = Sizes(width=128, layers=4, batch=8)


# All of them.


def one(way: str, sizes: Sizes, folder: Path, *, quick: bool) -> dict[str, Any]:
    task = {"way": way, **asdict(sizes), "settle_each_step": quick}
    return run_loop(HERE / "tensorflow_loop.py", task, folder)


def figures(results: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Of each way, each figure's value in each repetition that is not void; saves' times are of all saves."""
    found: dict[str, dict[str, list[float]]] = {}
    for way, loops in pairs(results, BASE).items():
        of: dict[str, list[float]] = {}
        for mine, none in loops:
            values = {
                "trigger": mine["trigger_seconds"],
                "stall": mine["stall_seconds"],
                "durable": mine["durable_seconds"],
                "worst": [max(mine["step_seconds"])],
                "step": [statistics.median(mine["step_seconds"])],
                "slowdown": [100 * (mine["loop_seconds"] / none["loop_seconds"] - 1)],
                "with last": [100 * ((mine["loop_seconds"] + mine["last_wait_seconds"]) / none["loop_seconds"] - 1)],
                "memory": [(mine["highest_bytes"] - none["highest_bytes"]) / MIB],
                "saves": [mine["saves"]],
                "skipped": [mine["skipped"]],
            }
            if mine["saves"]:
                values["cpu"] = [(mine["cpu_seconds"] - none["cpu_seconds"]) / mine["saves"]]
            for name, some in values.items():
                of.setdefault(name, []).extend(some)
        found[way] = of
    return found


def report(results: dict[str, Any], sizes: Sizes) -> str:
    found = figures(results)
    copy = statistics.median(floor["warm memcpy"] for floor in results["floors"])
    state = results["loops"][BASE][0]["state_bytes"] / MIB
    lines = [
        "# What checkpoints cost a TensorFlow loop",
        "",
        ", ".join(f"{k} {v}" for k, v in results["versions"].items()),
        "",
        f"{state:.0f} MiB of resource variables with Adam in a `MonitoredTrainingSession`, {sizes.steps} steps of "
        f"{spread(found[BASE]['step'])} s on all cores, a save due after every {sizes.every}. Medians, with the least "
        f"and the most of {len(results['floors'])} rounds; of a save's times, of all saves.",
        "",
        *table({way: times_of(way, of, copy) for way, of in found.items()}),
        "",
        "*Trigger*: the method that takes the snapshot; the plain hook writes there too. *Held up*: all that the hook "
        "does in a step that saves, with the wait for the save before it.",
        "",
        *table({way: made_by(way, of, results["loops"][way]) for way, of in found.items() if way != BASE}),
        "",
        "*Good*: every variable and slot tells the step in the checkpoint's name. *Torn*: they tell several. All "
        "checkpoints of all rounds were read back, the first and the last of each run too.",
        "",
        *(f"- {way}: {ABOUT[way]}." for way in found),
        *unavailable(results),
        "",
    ]
    for name in results["floors"][0]:
        lines.append(f"- floor, {name}: {spread([floor[name] for floor in results['floors']], '.3f')} s.")
    return "\n".join([*lines, "", *goals(found, copy), ""])


def times_of(way: str, of: dict[str, list[float]], copy: float) -> dict[str, str]:
    beside = statistics.median(of["trigger"]) / copy if of["trigger"] and has_hook(way) else None
    return {
        "trigger, ms": spread([1000 * seconds for seconds in of["trigger"]], ".1f"),
        "x warm memcpy": "" if beside is None else f"{beside:.2f}",
        "held up, ms": spread([1000 * seconds for seconds in of["stall"]], ".1f"),
        "worst step, s": spread(of["worst"]),
        "loop slowdown, %": spread(of["slowdown"], ".0f") if way != BASE else "",
        "with the last write, %": spread(of["with last"], ".0f") if way != BASE else "",
    }


def made_by(way: str, of: dict[str, list[float]], loops: list[dict[str, Any]]) -> dict[str, str]:
    sums = [str(sum(loop[kind] for loop in loops)) for kind in ("good", "torn", "mislabelled")]
    return {
        "to durable, s": spread(of["durable"]),
        "synced": "yes" if loops[0]["synced"] else "no",
        "saves made": spread(of["saves"], ".0f"),
        "steps put off": spread(of["skipped"], ".0f"),
        "good / torn / mislabelled": " / ".join(sums) if has_hook(way) else "",
        "CPU a save, s": spread(of.get("cpu")),
        "memory beside the state, MiB": spread(of["memory"], ".0f"),
        "void": void_attempts(loops),
    }


def has_hook(way: str) -> bool:
    return way not in (BASE, "bare writer")


def goals(found: dict[str, dict[str, list[float]]], copy: float) -> list[str]:
    lines = [
        f"Goals: trigger at most {TRIGGER_GOAL} x a warm copy; slowdown at most {SLOWDOWN_GOAL:.0f} %, with no fewer "
        "checkpoints than the old hook made.",
        "",
    ]
    old = statistics.median(found["old hook"]["saves"]) if "old hook" in found else 0
    for way in (way for way in found if way.startswith("ours") and found[way]["trigger"]):
        trigger, slowdown = statistics.median(found[way]["trigger"]) / copy, statistics.median(found[way]["slowdown"])
        saves = statistics.median(found[way]["saves"])
        lines.append(
            f"- {way}: trigger {trigger:.2f} x, {_said(trigger <= TRIGGER_GOAL)}; slowdown {slowdown:.0f} %, "
            f"{_said(slowdown <= SLOWDOWN_GOAL)}; {saves:.0f} checkpoints beside {old:.0f}, {_said(saves >= old)}"
        )
    return lines


def _said(met: bool) -> str:
    return "met" if met else "MISSED"


# The small form.


def check_counts(results: dict[str, dict[str, Any]], sizes: Sizes) -> None:
    """Each save was waited for before the next step, so every count is known."""
    due = sizes.steps // sizes.every
    whole = 1 + (sizes.warm_steps + sizes.steps) // sizes.every + 1  # the first, those that were due, the last
    for way, result in results.items():
        found = {name: result[name] for name in ("saves", "skipped", "good", "torn", "mislabelled")}
        made = 0 if way == BASE else due
        kept = 0 if way in (BASE, "bare writer") else whole
        assert found == {"saves": made, "skipped": 0, "good": kept, "torn": 0, "mislabelled": 0}, f"{way}: {found}"
        assert len(result["trigger_seconds"]) == len(result["durable_seconds"]) == made
        assert result["state_bytes"] >= sizes.nbytes
        assert not kept or result["checkpoint_bytes"] >= result["state_bytes"], f"{way}: {result['checkpoint_bytes']}"
    snapshots = {way: result["snapshot"] for way, result in results.items() if result["snapshot"]}
    assert snapshots == {"ours": "handles", "ours, copy": "copy", "ours, held": "handles"}, snapshots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; each takes about ten minutes")
    parser.add_argument("--batch", type=int, default=FULL.batch, help="rows of a step")
    parser.add_argument("--layers", type=int, default=FULL.layers, help="of 48 MiB each with Adam's slots")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS, help=f"{BASE!r} is always one of them")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="midstride-bench-", dir=arguments.folder))
    try:
        if arguments.quick:
            check_counts({way: one(way, QUICK, folder, quick=True) for way in WAYS}, QUICK)
            print("counts and bytes are as they should be")
            return
        sizes = Sizes(FULL.width, arguments.layers, arguments.batch)
        ways = [way for way in WAYS if way == BASE or way in arguments.ways]

        def keep(results: dict[str, Any]) -> None:
            results["versions"] = versions(results["loops"][BASE][0]["tensorflow"])
            (arguments.out / "tensorflow.json").write_text(json.dumps(results, indent=1))

        arguments.out.mkdir(parents=True, exist_ok=True)
        results = run_rounds(
            lambda way: one(way, sizes, folder, quick=False), ways, arguments.repeats, sizes.nbytes, folder, keep
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = report(results, sizes)
    (arguments.out / "tensorflow.md").write_text(text)
    print(text)


def versions(tensorflow: str) -> dict[str, str]:
    return {
        "midstride": version("midstride"),
        "tensorflow": tensorflow,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": str(os.cpu_count()),
    }


if __name__ == "__main__":
    main()
