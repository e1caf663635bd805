"""``midstride ls|show|verify RUN``: look into a folder of Midstride's or TensorFlow's checkpoints. Nothing is written.

Exit codes, for scripts:

    0   fine
    1   something is damaged: a checkpoint that cannot be used, a byte that differs
    2   wrong usage
    3   there is no such folder, step or array, or nothing was ever saved there
    4   the folder, or a checkpoint in it, could not be looked at (permission, input or output error, a disk that is
        not mounted)
    5   some of TensorFlow's checkpoints have no digests beside them, and cannot be checked; the others are fine
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from midstride.errors import MidstrideError, NotCommitted, NotFound, RestoreError, StorageError, Unavailable
from midstride.info import CheckpointInfo
from midstride.reader import RunReader
from midstride.tensorflow import CheckpointFolder

DAMAGED, USAGE, MISSING, UNREADABLE, UNCHECKED = 1, 2, 3, 4, 5

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Look into a run's folder of checkpoints.", rich_markup_mode=None
)

Run = Annotated[Path, typer.Argument(help="The run's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Step = Annotated[int | None, typer.Option(help="The step; default: see the command.")]


@app.command("ls")
def list_checkpoints(run: Run, as_json: AsJson = False) -> None:
    """List the checkpoints, the oldest first, and what else lies there."""
    catalog = _reader(run).scan()
    if as_json:
        _print_json(
            {
                "run": catalog.run,
                "checkpoints": [_info_data(info) for info in catalog.checkpoints],
                "unusable": [
                    {"name": entry.folder, "step": entry.step, "problem": str(entry.problem)}
                    for entry in catalog.unusable
                ],
                "debris": sorted(catalog.debris),
            }
        )
    else:
        unusable = [f"step {entry.step}: {entry.problem}" for entry in catalog.unusable]
        _print_catalog(catalog.checkpoints, catalog.latest, unusable, sorted(catalog.debris))
    if any(isinstance(entry.problem, Unavailable) for entry in catalog.unusable):
        raise typer.Exit(UNREADABLE)
    if catalog.unusable:
        raise typer.Exit(DAMAGED)
    if not catalog.ever_committed:
        raise typer.Exit(MISSING)


@app.command()
def show(run: Run, step: Step = None, as_json: AsJson = False) -> None:
    """Show one checkpoint (default: the latest): its facts, values and arrays."""
    reader = _reader(run)
    if isinstance(reader, CheckpointFolder):
        raise typer.BadParameter("these are TensorFlow's checkpoints: use ls and verify, and TensorFlow to look inside")
    description = reader.describe(step)
    if as_json:
        _print_json(description)
        return
    console = Console(markup=False, highlight=False)
    facts = Table(show_header=False, box=None)
    for key, value in description["checkpoint"].items():
        facts.add_row(key, str(value))
    console.print(facts)
    arrays = Table("array", "dtype", "shape", "bytes", "file")
    for array in description["arrays"]:
        arrays.add_row(array["name"], array["dtype"], str(array["shape"]), _size(array["bytes"]), array["file"])
    console.print(arrays)


@app.command()
def verify(run: Run, step: Step = None, as_json: AsJson = False) -> None:
    """Read and check every byte of all checkpoints, or of those of one step."""
    reader = _reader(run)
    total = sum(info.nbytes for info in reader.scan().checkpoints if step in (None, info.step))
    result = _with_progress(total, lambda told: reader.verify(step, told), shown=not as_json)
    unchecked = reader.unchecked(step) if isinstance(reader, CheckpointFolder) else []
    if as_json:
        _print_json({"checkpoints": result, "unchecked": unchecked, "good": not any(result.values())})
    for folder, problems in result.items() if not as_json else ():
        print(f"{folder}: {'damaged' if problems else 'good'}")
        for problem in problems:
            print(f"    {problem}")
    for folder in unchecked if not as_json else ():
        print(f"{folder}: not checked, it has no digests: Midstride did not write it")
    if any(result.values()):
        raise typer.Exit(DAMAGED)
    if unchecked:
        raise typer.Exit(UNCHECKED)
    if not result:
        print(f"{run}: nothing was ever saved here", file=sys.stderr)
        raise typer.Exit(MISSING)


def _reader(run: Path) -> RunReader | CheckpointFolder:
    return CheckpointFolder(run) if CheckpointFolder.is_one(run) else RunReader(run)


def _with_progress(
    total: int, work: Callable[[Callable[[int], None]], dict[str, list[str]]], *, shown: bool
) -> dict[str, list[str]]:
    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        return work(lambda _: None)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("checking", total=total)
        return work(lambda nbytes: progress.advance(task, nbytes))


def _info_data(info: CheckpointInfo) -> dict[str, Any]:
    return {**asdict(info), "metrics": dict(info.metrics)}


def _strict(data: Any) -> Any:
    """Data that strict JSON can hold: a metric that is NaN or infinite becomes a string."""
    if isinstance(data, dict):
        return {key: _strict(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_strict(value) for value in data]
    if isinstance(data, float) and data - data != 0:
        return repr(data)
    return data


def _print_json(data: Any) -> None:
    print(json.dumps(_strict(data), indent=2, allow_nan=False))


def _print_catalog(
    checkpoints: list[CheckpointInfo], latest: CheckpointInfo | None, unusable: list[str], debris: list[str]
) -> None:
    console = Console(markup=False, highlight=False)
    table = Table("step", "seq", "saved (UTC)", "size", "metrics", "folder")
    for info in checkpoints:
        metrics = ", ".join(f"{name} {_number(value)}" for name, value in info.metrics.items())
        mark = " (latest)" if info is latest else ""
        row = (f"{info.step}{mark}", str(info.seq), info.created[:19], _size(info.nbytes), metrics, info.name)
        table.add_row(*row)
    console.print(table if checkpoints else "no usable checkpoint")
    for problem in unusable:
        console.print(f"unusable: {problem}", style="red", markup=False)
    for name in debris:
        console.print(f"debris: {name} (of a save that never ended; the next save removes it)", markup=False)


def _number(value: float | None) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


def main() -> None:
    """The console script: like ``app``, with errors as one line and an exit code."""
    try:
        app()
    except (NotFound, NotCommitted) as error:
        _fail(error, MISSING)
    except RestoreError as error:
        _fail(error, DAMAGED)
    except StorageError as error:
        _fail(error, UNREADABLE)


def _fail(error: MidstrideError, code: int) -> None:
    print(f"midstride: {error}", file=sys.stderr)
    raise SystemExit(code)
