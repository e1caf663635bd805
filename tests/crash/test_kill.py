"""A real SIGKILL at every operation of a save, an overwrite, a retirement; a restore in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.runs import RUNS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("run", RUNS)
def test_killed_at_every_operation(run: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.crash.zygote", run, str(tmp_path / "base")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row for row in rows if row["ended"] or row["wrong"] or row["left"]] == []
    assert len(rows) > 30
    assert [row["killed"] for row in rows] == [True] * (len(rows) - 1) + [False]
    # The kills fell before, between and after the acknowledgements.
    assert {len(row["said"]) for row in rows} == set(range(len(rows[-1]["said"]) + 1))
