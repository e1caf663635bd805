"""The benchmark runs, on small sizes: it asserts counts and bytes itself, and never a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_quick_form(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "bench_core.py"
    command = [sys.executable, str(script), "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "midstride: stall of save()" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(900)  # many processes that import a framework
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_quick_form_of_the_loops(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    name = {"torch": "bench_training.py", "tensorflow": "bench_tensorflow.py"}[framework]
    script = Path(__file__).parents[2] / "benchmarks" / name
    command = [sys.executable, str(script), "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "counts and bytes are as they should be" in done.stdout
    assert list(tmp_path.iterdir()) == []
