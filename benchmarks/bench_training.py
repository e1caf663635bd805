"""What checkpoints cost a PyTorch loop: Midstride's ways, PyTorch's, safetensors, none, and the bare writer.

    python benchmarks/bench_training.py            a transformer with AdamW, 1.2 GiB; about 35 minutes
    python benchmarks/bench_training.py --quick    small sizes; asserts counts and bytes, never time

Three loops: all cores busy and a save at every third step; the same with a save whenever twice the time of a raw write
has passed; and the first with a core to spare. The first compares all ways, the others only five of them unless
``--ways`` names more: a round of one kind takes about 8 minutes with all nine, and there are two rounds of each kind.

Each repetition of each way is a process of its own (``training_loop.py``), in rounds (``rounds.py``). Each slowdown is
against the loop without checkpoints of the same round, and counts the waits for the save before; the wait for the very
last one is shown apart. The JSON is written after each round.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from machine import MIB, floors
from rounds import Loop, LoopFailed, note, pairs, run_loop, run_rounds, spread, table, unavailable, void_attempts

HERE = Path(__file__).parent
BASE, BARE, OURS, THREAD = "none", "bare writer", "midstride, process", "midstride, thread"
ABOUT = {
    BASE: "no checkpoints",
    BARE: "another process writes as many bytes at the same moments, O_DIRECT and fsync, no copy, no digest",
    OURS: "`Checkpointer(...)`: the writer is a process",
    THREAD: '`Checkpointer(..., engine="thread")`',
    "midstride, discarding": "the process, into a storage that throws the bytes away after the digest",
    "torch.save": "one file, on the training thread, buffered",
    "safetensors": "`save_file`, on the training thread, buffered",
    "DCP async, thread": "`torch.distributed.checkpoint.async_save`, its stager keeps its memory; files are synced",
    "DCP async, process": "the same with its process",
}
FEW = [BASE, BARE, OURS, THREAD, "DCP async, thread"]
"""What the second and the third kind of loop compare by default."""
BARE_GOAL, SPARE_GOAL, TAX_GOAL, MEMORY_GOAL_MIB = 10.0, 2.0, 15.0, 64.0
"""Points over the bare writer, both cores busy and with one to spare; per cent; beside one more copy of the state."""


@dataclass(frozen=True)
class Sizes:
    width: int
    layers: int
    tokens: int
    threads: int
    warm_steps: int = 2
    steps: int = 15
    every: int = 3
    seconds: float | None = None


CORES = os.cpu_count() or 1
STATE_BYTES = 1154 * MIB
"""Of the full size, for the floors."""
QUICK = Sizes(width=64, layers=2, tokens=16, threads=CORES, steps=6)
KINDS = {
    "busy": "all cores busy, a save at every third step",
    "interval": "all cores busy, a save whenever twice a raw write's time has passed",
    "spare": "a core to spare, a save at every third step",
}


def one(way: str, sizes: Sizes, folder: Path) -> Loop:
    return run_loop(HERE / "training_loop.py", {"way": way, **asdict(sizes)}, folder)


# The report.


def figures(results: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Of each way, each figure's value in each repetition that counts; saves' times are of all saves."""
    found: dict[str, dict[str, list[float]]] = {}
    for way, both in pairs(results, BASE).items():
        of: dict[str, list[float]] = {}
        for mine, none in both:
            values = {
                "call": mine["call_seconds"],
                "durable": mine["durable_seconds"],
                "step": [statistics.median(mine["step_seconds"])],
                "slowdown": [100 * (mine["loop_seconds"] / none["loop_seconds"] - 1)],
                "last": [mine["last_wait_seconds"]],
                "memory": [(mine["highest_bytes"] - none["highest_bytes"]) / MIB],
                "saves": [mine["saves"]],
                "cold": [mine["restore_cold_seconds"]] if mine["restore_cold_seconds"] is not None else [],
                "warm": [mine["restore_warm_seconds"]] if mine["restore_warm_seconds"] is not None else [],
            }
            if mine["saves"]:
                values["cpu"] = [(mine["cpu_seconds"] - none["cpu_seconds"]) / mine["saves"]]
            for name, some in values.items():
                of.setdefault(name, []).extend(some)
        found[way] = of
    return found


def section(kind: str, results: dict[str, Any]) -> list[str]:
    found = figures(results)
    base = results["loops"][BASE]
    memcpy = [floor["warm memcpy"] for floor in results["floors"]]
    written = [floor["direct write + fsync"] for floor in results["floors"]]
    rows = {}
    for way, of in found.items():
        if way == BASE:
            continue
        loops = results["loops"][way]
        rows[way] = {
            "call, s": spread(of["call"]),
            "loop slowdown, %": spread(of["slowdown"], ".0f"),
            "wait for the last, s": spread(of["last"]),
            "until there, s": spread(of["durable"]),
            "synced": "yes" if loops[0]["synced"] else "no",
            "CPU a save, s": spread(of.get("cpu")),
            "memory, MiB": spread(of["memory"], ".0f"),
            "restore cold / warm, s": f"{spread(of['cold'])} / {spread(of['warm'])}" if of["cold"] else "",
            "flipped bit": {True: "noticed", False: "NOT noticed", None: ""}[loops[0]["flipped_bit_noticed"]],
            "saves": spread(of["saves"], ".0f"),
            "void": void_attempts(loops),
        }
    return [
        f"## {KINDS[kind][0].upper()}{KINDS[kind][1:]}",
        "",
        f"{base[0]['state_bytes'] / MIB:.0f} MiB in {base[0]['arrays']} arrays, {len(base[0]['step_seconds'])} steps "
        f"of {spread(found[BASE]['step'])} s, {len(base)} rounds. Floors: warm memcpy {spread(memcpy)} s, direct "
        f"write + fsync {spread(written)} s.",
        "",
        *table(rows),
        "",
        *goals(kind, found, base[0]["state_bytes"] / MIB),
        *unavailable(results),
        "",
    ]


def goals(kind: str, found: dict[str, dict[str, list[float]]], state_mib: float) -> list[str]:
    lines = []

    def said(what: str, value: float, limit: float, unit: str) -> None:
        lines.append(f"- {what}: {value:.0f} {unit}, goal at most {limit:.0f}: {'met' if value <= limit else 'MISSED'}")

    middle = {way: statistics.median(of["slowdown"]) for way, of in found.items()}
    if OURS in found and BARE in found:
        points = SPARE_GOAL if kind == "spare" else BARE_GOAL
        said(f"{OURS} beside the bare writer's {middle[BARE]:.0f} %", middle[OURS] - middle[BARE], points, "points")
    if "midstride, discarding" in found and kind == "busy":
        said("the library's own tax", middle["midstride, discarding"], TAX_GOAL, "%")
    for way in (OURS, THREAD):
        if way in found:
            said(f"{way}, the most memory", max(found[way]["memory"]), state_mib + MEMORY_GOAL_MIB, "MiB")
    return lines


def report(results: dict[str, dict[str, Any]], versions: dict[str, str]) -> str:
    lines = [
        "# What checkpoints cost a PyTorch loop",
        "",
        ", ".join(f"{name} {value}" for name, value in versions.items()),
        "",
        "Medians, with the least and the most; of a save's times, of all saves. *Call*: what a save holds the loop up "
        "for, with the wait for the one before. *Until there*: from the call until the bytes are on stable storage "
        "where *synced* says so, else in the page cache. Of Midstride, *wait for the last* and the next *call* include "
        "the deletion of the older checkpoint, *until there* does not. *CPU* and *memory* (PSS) are of all processes, "
        "beside the loop without checkpoints. *Cold*: after fsync and `posix_fadvise(DONTNEED)` of the checkpoint's "
        "files. *Flipped bit*: one in the middle of the largest file, then a restore.",
        "",
        "The model is encoder layers only, no embedding. A core to spare is `torch.set_num_threads(cores - 1)`, with "
        "as many fewer tokens. *Void*: attempts during which the machine was not ours; they are made again, at most "
        "twice, and what stays void counts only where all of a way is void.",
        "",
    ]
    for kind, of in results.items():
        lines += section(kind, of)
    ways = [way for way in ABOUT if any(way in of["loops"] for of in results.values())]
    return "\n".join([*lines, *(f"- {way}: {ABOUT[way]}." for way in ways), ""])


# The small form.


def check_counts(results: dict[str, Loop]) -> None:
    for way, result in results.items():
        due = 0 if way == BASE else QUICK.steps // QUICK.every
        assert result["saves"] == len(result["call_seconds"]) == len(result["durable_seconds"]) == due, way
        if way not in (BASE, BARE, "midstride, discarding"):
            assert result["restored_equal"], way
            assert result["checkpoint_bytes"] >= result["state_bytes"], way
        if way.startswith("midstride") and way != "midstride, discarding":
            assert result["flipped_bit_noticed"], way


def quick(folder: Path) -> None:
    results = {}
    for way in ABOUT:
        try:
            results[way] = one(way, QUICK, folder)
        except LoopFailed as failure:
            missing = str(failure).startswith(("ImportError", "ModuleNotFoundError"))
            if not missing or way not in ("safetensors", "DCP async, thread", "DCP async, process"):
                raise
            note(f"left out: {way}: {failure}")
    check_counts(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=2, help="rounds of each kind of loop")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ways", nargs="*", choices=ABOUT, help=f"of every kind; {BASE!r} is always one of them")
    parser.add_argument("--tokens", type=int, default=160, help="of a step: more take longer")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="midstride-bench-", dir=arguments.folder))
    try:
        if arguments.quick:
            quick(folder)
            print("counts and bytes are as they should be")
            return
        arguments.out.mkdir(parents=True, exist_ok=True)
        results: dict[str, dict[str, Any]] = {}
        for kind in arguments.kinds:
            sizes = sizes_of(kind, arguments.tokens, folder)
            named = arguments.ways if arguments.ways is not None else list(ABOUT) if kind == "busy" else FEW

            def keep(of: dict[str, Any], kind: str = kind) -> None:
                results[kind] = of
                (arguments.out / "training.json").write_text(json.dumps({"versions": versions(), **results}, indent=1))

            run_rounds(
                lambda way, sizes=sizes: one(way, sizes, folder),
                [way for way in ABOUT if way == BASE or way in named],
                arguments.repeats,
                STATE_BYTES,
                folder,
                keep,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = report(results, versions())
    (arguments.out / "training.md").write_text(text)
    print(text)


def sizes_of(kind: str, tokens: int, folder: Path) -> Sizes:
    threads = max(1, CORES - 1) if kind == "spare" else CORES
    seconds = 2 * floors(STATE_BYTES, folder)["direct write + fsync"] if kind == "interval" else None
    # With one core the step takes twice as long, so it gets half the tokens.
    return Sizes(1024, 8, tokens * threads // CORES, threads, seconds=seconds)


def versions() -> dict[str, str]:
    found = {name: installed(name) for name in ("midstride", "torch", "safetensors", "numpy")}
    return found | {"python": platform.python_version(), "kernel": platform.release(), "cores": str(CORES)}


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
