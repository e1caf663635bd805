"""The benchmark runs, on small sizes: it asserts counts and bytes itself, and never a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_quick_form(tmp_path: Path) -> None:
    script = BENCHMARKS / "bench_core.py"
    command = [sys.executable, str(script), "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "midstride: stall of save()" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(900)  # many processes that import a framework
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_quick_form_of_the_loops(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    name = {"torch": "bench_training.py", "tensorflow": "bench_tensorflow.py"}[framework]
    script = BENCHMARKS / name
    command = [sys.executable, str(script), "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "counts and bytes are as they should be" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import rounds

    return rounds


def test_a_loop_that_fails_ends_its_way_and_not_the_run(rounds: Any, tmp_path: Path) -> None:
    """What the round before measured stays, and after each round the results so far are kept."""
    script = tmp_path / "loop.py"
    script.write_text(
        "import json, os, sys; task = json.loads(sys.argv[1]); print('measuring'); print('measured')\n"
        "if task['fails']: raise RuntimeError('one\\ntwo')\n"
        "print(json.dumps({'loop_seconds': 1.0, 'empty': os.listdir(task['folder']) == []}))"
    )
    ran: list[str] = []

    def run(way: str) -> Any:
        ran.append(way)
        return rounds.run_loop(script, {"way": way, "fails": way == "late" and ran.count("late") == 2}, tmp_path)

    def keep(results: Any) -> None:
        kept.append({way: len(loops) for way, loops in results["loops"].items()})

    kept: list[dict[str, int]] = []
    rounds.ATTEMPTS = 1
    results = rounds.run_rounds(run, ["base", "other", "late"], 3, 2**20, tmp_path, keep)
    assert kept == [
        {"base": 1, "other": 1, "late": 1},
        {"base": 2, "other": 2, "late": 1},
        {"base": 3, "other": 3, "late": 1},
    ]
    assert results["unavailable"] == {"late": "two"}
    assert all(loop["empty"] for loops in results["loops"].values() for loop in loops)
    assert len(rounds.pairs(results, "base")["other"]) >= 1
    assert len(rounds.pairs(results, "base")["late"]) == 1
    assert list(tmp_path.iterdir()) == [script]


def test_without_what_the_others_are_compared_with_there_is_no_run(rounds: Any, tmp_path: Path) -> None:
    def run(way: str) -> Any:
        raise rounds.LoopFailed("no")

    with pytest.raises(rounds.LoopFailed):
        rounds.run_rounds(run, ["base"], 1, 2**20, tmp_path, lambda results: None)


def test_every_attempt_that_was_void_is_counted(rounds: Any) -> None:
    loops = [{"attempt": 2, "void": False}, {"attempt": 3, "void": True}, {"attempt": 1, "void": False}]
    assert rounds.void_attempts(loops) == "4 of 6 attempts"
