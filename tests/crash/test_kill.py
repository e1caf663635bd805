"""A real SIGKILL at every operation of a save, an overwrite, a retirement; a restore in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.crash.broken import KILLS
from tests.crash.runs import RUNS

ROOT = Path(__file__).parents[2]


def zygote(*arguments: str) -> list[dict[str, Any]]:
    """A line for each operation at which the run was killed."""
    command = [sys.executable, "-m", "tests.crash.zygote", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("run", RUNS)
def test_killed_at_every_operation(run: str, tmp_path: Path) -> None:
    rows = zygote(run, str(tmp_path / "base"))
    assert [row for row in rows if row["ended"] or row["wrong"] or row["left"]] == []
    assert len(rows) > 30
    assert [row["killed"] for row in rows] == [True] * (len(rows) - 1) + [False]
    # The kills fell before, between and after the acknowledgements.
    assert {len(row["said"]) for row in rows} == set(range(len(rows[-1]["said"]) + 1))


@pytest.mark.parametrize("broken", KILLS)
def test_the_sweep_notices_a_broken_variant(broken: str, tmp_path: Path) -> None:
    *_, last = zygote(KILLS[broken][0], str(tmp_path / "base"), broken)
    assert last["killed"]
    assert last["wrong"] or last["left"]
