"""Run small scripts in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import midstride

WATCHDOG_SECONDS = 120


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    source = Path(midstride.__file__).resolve().parents[1]
    search = os.pathsep.join([str(source), str(Path(__file__).resolve().parent)])
    return {**os.environ, "PYTHONPATH": search, "OPENBLAS_NUM_THREADS": "1", **extra}


def run_script(
    source: str, *arguments: object, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end; the caller looks at ``returncode``, ``stdout`` and ``stderr``."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)],
        env=_environment(env or {}),
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        **options,
    )


def run_well(source: str, *arguments: object, **options: Any) -> str:
    """Run a script that must end with 0; return what it printed."""
    ended = run_script(source, *arguments, **options)
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def start_script(source: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start a script with pipes to its standard input and output."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(source), *map(str, arguments)],
        env=_environment({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
