"""From a folder to a state: which checkpoint, does it fit, read it verified, put it back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from midstride.adapters import Report
from midstride.errors import (
    CorruptCheckpoint,
    Gone,
    MidstrideError,
    NotCommitted,
    NotFound,
    NothingRestorable,
    StateMismatch,
    Unavailable,
    UnsupportedState,
)
from midstride.format import layout
from midstride.format.values import decode_tree
from midstride.info import CheckpointInfo
from midstride.restore.catalog import Catalog, Unusable, describe_problems, info_of, read_manifest, scan
from midstride.restore.match import Fill, Matcher
from midstride.restore.reader import CheckpointReader, Want
from midstride.restore.select import Selection, last_parts, rename_tree
from midstride.storage.base import ReadableStorage
from midstride.tree import named_leaves, pointer

_log = logging.getLogger("midstride")


@dataclass(frozen=True, slots=True)
class Options:
    """How a checkpoint may differ from what it fills; said by the caller, never assumed."""

    only: str | Sequence[str] | Mapping[str, Any] | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    cast: bool = False
    strict: bool = True
    on_touch: Callable[[], None] = lambda: None
    """Called before the first change of an object that the caller has."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore gave."""

    step: int
    state: Any
    """The template with its objects loaded and its arrays replaced; without a template, plain containers."""
    metrics: Mapping[str, float | int | None]
    info: CheckpointInfo
    warnings: tuple[str, ...] = ()
    """What the caller should know: newer checkpoints passed over, names that did not match."""
    types: Mapping[str, str] = field(default_factory=dict)
    """Path -> original class, for what has lost its class because no template had it."""
    bad: tuple[int, ...] = ()
    """``seq`` of the checkpoints that were found bad on the way."""


def find(storage: ReadableStorage) -> Catalog:
    """The folder's catalog; an empty one where there is no such folder. Raises if it could not be looked at."""
    try:
        return scan(storage)
    except NotFound:
        return Catalog()


def nothing_restorable(storage: ReadableStorage, catalog: Catalog) -> NothingRestorable:
    """The error for a folder where something was saved and nothing can be used."""
    what = describe_problems(catalog) or "its checkpoints are gone; only the mark that there were some is left"
    return NothingRestorable(
        f"{storage.description} has held checkpoints, and none can be restored: {what}. Nothing was changed or "
        "deleted. Do not start at step 0 over them: look at the files, or choose another folder for a new run"
    )


def nothing_saved(storage: ReadableStorage) -> NotCommitted:
    """The error for a folder where nothing was ever saved, for callers who cannot do without."""
    return NotCommitted(f"nothing was ever saved in {storage.description}")


def restore(
    storage: ReadableStorage, template: Any, step: int | None, options: Options, *, fallback: bool
) -> Restored | None:
    """Restore the latest checkpoint, or the latest of one step, into a template. None: nothing was ever saved.

    Retries once if checkpoints were retired while they were read.
    """
    touched: list[bool] = []

    def touch() -> None:
        touched.append(True)
        options.on_touch()

    told = replace(options, on_touch=touch)
    try:
        try:
            return _restore(storage, template, step, told, fallback=fallback)
        except Gone:
            return _restore(storage, template, step, told, fallback=fallback)
    except MidstrideError as error:
        if touched:
            error.args = (str(error).replace(_UNCHANGED, "") + _OVERWRITTEN,)
        raise


_UNCHANGED = "; nothing was changed"
_OVERWRITTEN = ". The objects in the state may be partly overwritten: build them anew, and restore again"


def _restore(
    storage: ReadableStorage, template: Any, step: int | None, options: Options, *, fallback: bool
) -> Restored | None:
    catalog = find(storage)
    if not catalog.ever_committed:
        if step is not None:
            raise not_committed(storage, catalog, step)
        if catalog.debris:
            _log.warning("%s: only what a first save that never ended left: %s", storage.description, catalog.debris)
        return None
    candidates = [info for info in reversed(catalog.checkpoints) if step in (None, info.step)]
    warnings = _passed_over(catalog, candidates, step)
    if warnings and not fallback:
        raise _strict(warnings[0], candidates)
    if not candidates:
        raise nothing_restorable(storage, catalog) if step is None else not_committed(storage, catalog, step)
    return _first_good(storage, catalog, candidates, template, options, warnings, step=step, fallback=fallback)


def _passed_over(catalog: Catalog, candidates: list[CheckpointInfo], step: int | None) -> list[str]:
    """Unusable checkpoints that may be newer than the first candidate; an unreadable one has no known place.

    A damaged one is passed over. One that could not be looked at is not: going back would be a guess.
    """
    newest = candidates[0].seq if candidates else -1
    entries = [e for e in catalog.unusable if step in (None, e.step) and (e.info is None or e.info.seq > newest)]
    raise_unreadable(entries, catalog.latest if step is None else None)
    return [f"step {entry.step} was passed over: {entry.problem}" for entry in entries]


def raise_unreadable(entries: Iterable[Unusable], readable: CheckpointInfo | None) -> None:
    """Raise the first problem that is the storage's and not the checkpoint's. ``readable``: what is there beside it."""
    for entry in entries:
        if isinstance(entry.problem, Unavailable):
            by_step = f"; or name the step (step={readable.step} is the latest that can be read)" if readable else ""
            raise Unavailable(
                f"{entry.folder} could not be looked at: {entry.problem}. It may be the newest, so no other was taken "
                f"for that. Nothing on disk was changed. Try again{by_step}; or move that folder out of the run's: "
                "then it no longer counts"
            ) from entry.problem


def _strict(problem: str, candidates: list[CheckpointInfo]) -> CorruptCheckpoint:
    others = ", ".join(str(info.step) for info in candidates[:3]) or "none"
    return CorruptCheckpoint(
        f"{problem}. The next candidates are steps: {others} (fallback=True takes the first good one)"
    )


def not_committed(storage: ReadableStorage, catalog: Catalog, step: int) -> MidstrideError:
    """The error for a step that no good checkpoint has."""
    steps = sorted({info.step for info in catalog.checkpoints})
    broken = [entry for entry in catalog.unusable if entry.step == step]
    if broken:
        return CorruptCheckpoint(f"step {step} of {storage.description} cannot be restored: {broken[-1].problem}")
    folders = [layout.parse_step_folder(name) for name in catalog.debris]
    begun = any(folder is not None and folder.step == step for folder in folders)
    hint = "a save of it has begun and is not committed" if begun else "it was never saved here, or is retired"
    return NotCommitted(f"no committed checkpoint of step {step} in {storage.description}: {hint}. Committed: {steps}")


def _first_good(
    storage: ReadableStorage,
    catalog: Catalog,
    candidates: list[CheckpointInfo],
    template: Any,
    options: Options,
    warnings: list[str],
    *,
    step: int | None,
    fallback: bool,
) -> Restored:
    bad = [entry.info.seq for entry in catalog.unusable if entry.info is not None]
    last: CorruptCheckpoint | None = None
    for number, info in enumerate(candidates):
        try:
            return _load(storage, info, template, options, warnings, bad)
        except CorruptCheckpoint as error:
            last = error
            bad.append(info.seq)
            if not fallback:
                raise _strict(f"step {info.step} ({info.name}): {error}", candidates[number + 1 :]) from error
            warnings.append(f"step {info.step} was passed over: {error}")
            _log.warning("checkpoint %s cannot be used, trying the one before: %s", info.name, error)
    message = "; ".join(warnings)
    if step is not None:
        raise CorruptCheckpoint(f"step {step} of {storage.description} cannot be restored: {message}") from last
    raise NothingRestorable(
        f"{storage.description} holds checkpoints, and none can be restored: {message}. Nothing on disk was changed"
    ) from last


def _load(
    storage: ReadableStorage,
    info: CheckpointInfo,
    template: Any,
    options: Options,
    warnings: Iterable[str],
    bad: list[int],
) -> Restored:
    try:
        manifest = read_manifest(storage, info.name)
    except NotFound as error:
        raise Gone(f"{info.name} was retired while it was read") from error
    report = Report(strict=options.strict, renamed=last_parts(options.rename))
    with CheckpointReader(storage, info.name, manifest) as reader:
        selection = Selection.of(options.only)
        tree = selection.prune(rename_tree(reader.tree, options.rename), report)
        wanted = selection.pick(template)
        matcher = Matcher(manifest, report, cast=options.cast, parts=selection.array_parts(tree))
        fill = _match(lambda: matcher.match(wanted, tree, template), report, info)
        wants = [Want(array, to.buffer, first, first + to.buffer.size) for array, to, first in fill.destinations]
        reader.check_headers([want.array for want in wants] if selection.pointers else None)
        if fill.in_place:
            options.on_touch()
        reader.read(wants)
    if fill.loads or fill.last_loads:
        options.on_touch()
    state = _put_back(fill, info)
    if template is not None and wanted is not template:
        state = {**template, **state}
    return Restored(
        info.step, state, info_of(manifest, info.name).metrics, info, (*warnings, *report.warnings),
        fill.types, tuple(bad),
    )  # fmt: skip


def _match(match: Callable[[], Fill], report: Report, info: CheckpointInfo) -> Fill:
    try:
        fill = match()
    except (TypeError, ValueError, OverflowError, RecursionError, UnsupportedState, ImportError) as error:
        raise StateMismatch(f"{info.name} cannot be restored here{_UNCHANGED}: {error}") from error
    if report.problems:
        lines = "\n  ".join(report.problems[:50])
        more = f"\n  and {len(report.problems) - 50} more" if len(report.problems) > 50 else ""
        raise StateMismatch(f"{info.name} does not fit the state{_UNCHANGED}:\n  {lines}{more}")
    return fill


def _put_back(fill: Fill, info: CheckpointInfo) -> Any:
    try:
        for load in (*fill.loads, *fill.last_loads):
            load()
        return fill.build()
    except (MidstrideError, MemoryError):
        raise
    except Exception as error:
        raise StateMismatch(f"{info.name} was read and verified, but an object refused its state: {error!r}") from error


def verify(
    storage: ReadableStorage, info: CheckpointInfo, on_bytes: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Check every byte of a checkpoint; return what is wrong, a line each, empty if nothing is."""
    try:
        manifest = read_manifest(storage, info.name)
        with CheckpointReader(storage, info.name, manifest) as reader:
            return reader.verify(on_bytes)
    except NotFound as error:
        raise Gone(f"{info.name} was retired while it was read") from error
    except CorruptCheckpoint as error:
        return [str(error)]


def describe(storage: ReadableStorage, info: CheckpointInfo) -> dict[str, Any]:
    """A checkpoint's facts, values and arrays from its manifest alone."""
    manifest = read_manifest(storage, info.name)
    arrays = []
    for path, index in named_leaves(decode_tree(manifest.tree)):
        array = manifest.arrays[index]
        arrays.append(
            {
                "name": pointer(path) or "/",
                "dtype": array.dtype,
                "shape": list(array.shape),
                "bytes": sum(part.end - part.begin for part in array.slices),
                "file": manifest.files[array.slices[0].file].name,
            }
        )
    facts = {**asdict(info), "metrics": dict(info.metrics), "versions": dict(manifest.versions)}
    return {"checkpoint": facts, "arrays": arrays, "values": manifest.tree}
