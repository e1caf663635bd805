"""Loops that are compared: each repetition of each way is a process of its own, and the ways take turns.

So a slow hour of the machine hits all. A repetition during which the machine was not ours is void and made again: a
copy in memory, before and after it, took longer than the quickest of the run, or other processes used the cores. A way
that fails is not tried again, and ends nothing but itself.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import Canary, floors, is_ours, user_seconds_of_others
from processes import pss_bytes

ATTEMPTS = 3
LOOK_SECONDS = 0.25
"""Between two looks at the processes' memory: one takes up to 20 ms of a core."""

Loop = dict[str, Any]
"""What a loop measured: ``loop_seconds`` at least."""


class LoopFailed(Exception):
    """Its text is the last line of the loop's error."""


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_loop(script: Path, task: dict[str, Any], folder: Path) -> Loop:
    """Run a loop in a process; what it measured, and the highest memory of it and what it started.

    Its argument is ``task`` as JSON with a new ``folder`` in this one, which is removed. It prints the lines
    "measuring" and "measured" around its loop, and last what it measured. Raises ``LoopFailed``.
    """
    place = tempfile.mkdtemp(dir=folder)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-W", "ignore", str(script), json.dumps({**task, "folder": place})]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        looking = threading.Event()
        highest: list[int] = [0]
        watcher = threading.Thread(target=_watch, args=(child.pid, looking, highest), daemon=True)
        last = ""
        assert child.stdout is not None
        for line in child.stdout:
            if line == "measuring\n":
                watcher.start()
            elif line == "measured\n":
                looking.set()
            elif line.startswith("{"):
                last = line
        if child.wait():
            looking.set()
            shutil.rmtree(place, ignore_errors=True)  # something that it started may still write there
            errors.seek(0)
            text = errors.read().strip()
            note(f"{task['way']}: exit code {child.returncode}\n{text[-3000:]}")
            raise LoopFailed(text.splitlines()[-1] if text else f"exit code {child.returncode}")
    shutil.rmtree(place)
    return {**json.loads(last), "highest_bytes": highest[0]}


def _watch(pid: int, ended: threading.Event, highest: list[int]) -> None:
    while not ended.wait(LOOK_SECONDS):
        highest[0] = max(highest[0], pss_bytes(pid))


def run_rounds(
    run: Callable[[str], Loop],
    ways: list[str],
    repeats: int,
    nbytes: int,
    folder: Path,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """``repeats`` rounds; in each, the floors and every way once, beginning with another way each time.

    ``keep`` gets the results so far after each round. The first of ``ways`` is what the others are compared with: if it
    fails, that is raised. Of another, "unavailable" says why, and its loops are those of the rounds before.
    """
    canary = Canary()
    results: dict[str, Any] = {"floors": [], "loops": {way: [] for way in ways}, "unavailable": {}}
    for number in range(repeats):
        note(f"round {number + 1} of {repeats}")
        results["floors"].append(floors(nbytes, folder))
        first = number % len(ways)
        for way in ways[first:] + ways[:first]:
            if way in results["unavailable"]:
                continue
            try:
                results["loops"][way].append(_on_a_quiet_machine(canary, way, run))
            except LoopFailed as failure:
                if way == ways[0]:
                    raise
                results["unavailable"][way] = str(failure)
        keep(results)
    return results


def _on_a_quiet_machine(canary: Canary, way: str, run: Callable[[str], Loop]) -> Loop:
    """The first of a few attempts during which the machine was ours, or the last."""
    for attempt in range(1, ATTEMPTS + 1):
        os.sync()  # what the loop before has left unwritten is not this one's
        before, others, began = canary.look(), user_seconds_of_others(), time.perf_counter()
        result = run(way)
        wall = time.perf_counter() - began
        others = (user_seconds_of_others() - others) / (wall * (os.cpu_count() or 1))
        os.sync()
        after = canary.look()
        result |= {"canary": [before, after], "others": others, "attempt": attempt}
        result["void"] = not is_ours([before, after], others)
        if not result["void"]:
            break
    loop, state = result["loop_seconds"], "VOID: the machine was not ours" if result["void"] else ""
    note(f"{way:22} loop {loop:6.2f} s  canary {before:.2f} {after:.2f}  others {others:.1%}  {state}")
    return result


def pairs(results: dict[str, Any], base: str) -> dict[str, list[tuple[Loop, Loop]]]:
    """Of each way that has any, its loops with the loop of ``base`` of the same round; not the void, if others are."""
    found = {}
    for way, loops in results["loops"].items():
        both = list(zip(loops, results["loops"][base], strict=False))  # a way that failed has fewer
        if not both:
            continue
        found[way] = [(mine, none) for mine, none in both if not (mine["void"] or none["void"])] or both
    return found


def void_attempts(loops: list[Loop]) -> str:
    attempts = sum(loop["attempt"] for loop in loops)
    return f"{attempts - sum(not loop['void'] for loop in loops)} of {attempts} attempts"


def unavailable(results: dict[str, Any]) -> list[str]:
    return [f"- Unavailable: {way}: {reason}" for way, reason in results["unavailable"].items()]


def spread(values: list[float] | None, form: str = ".2f") -> str:
    """The median, with the least and the most behind it."""
    if not values:
        return ""
    middle, least, most = (f"{value:{form}}" for value in (statistics.median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def table(rows: dict[str, dict[str, str]]) -> list[str]:
    columns = ["", *next(iter(rows.values()))]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {way} | {' | '.join(cells.values())} |" for way, cells in rows.items()]
