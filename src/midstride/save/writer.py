"""The writer's loop: take staged chunks, digest them, write them, sync, commit. Imports no framework.

It runs on a thread or in a process of its own: it takes requests from ``receive`` and answers
through ``send``, and shares nothing else with the trainer but the arena's memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import xxhash

from midstride import limits
from midstride.errors import (
    Busy,
    CommitError,
    MidstrideError,
    StagingError,
    StepExists,
    StorageError,
    Unavailable,
    WriteError,
)
from midstride.format import layout
from midstride.format.manifest import ArrayRecord, FileRecord, Manifest, Slice
from midstride.info import CheckpointInfo
from midstride.limits import OPEN_FILES_AHEAD
from midstride.save.digest import Digester
from midstride.save.messages import (
    Abort,
    Committed,
    Emptied,
    Failed,
    Job,
    Opened,
    OpenRun,
    Refused,
    Reply,
    Request,
    Retired,
    Retrying,
    Seal,
    Staged,
    Stop,
    Working,
)
from midstride.save.run_folder import RunFolder
from midstride.storage.base import Storage, WritableFile
from midstride.waiting import with_retries
from midstride.worker import Worker

_log = logging.getLogger("midstride")
_T = TypeVar("_T")


class Writer:
    """One run's writer."""

    def __init__(
        self, storage: Storage, owner: str, receive: Callable[[], Request], send: Callable[[Reply], None]
    ) -> None:
        self._storage = storage
        self._owner = owner
        self._receive = receive
        self._send = send
        self._run: RunFolder | None = None
        self._attempt: _Attempt | None = None
        self._disk = Worker("midstride-disk")

    def run(self) -> None:
        """Serve requests until ``Stop``."""
        try:
            while not isinstance(request := self._receive(), Stop):
                self._serve(request)
        finally:
            try:
                if self._attempt is not None:
                    self._give_up(self._attempt)
            finally:
                self._disk.stop()
                if self._run is not None:
                    self._run.close()

    def _serve(self, request: Request) -> None:
        match request:
            case OpenRun():
                self._open(request)
            case Job():
                self._attempt = self._begin(self._adopting(request))
            case Staged() if attempt := self._current(request.job):
                attempt.take(request)
                self._send(Emptied(request.job, request.place, attempt.job.plan.chunks[request.chunk].nbytes))
            case Abort():
                if attempt := self._current(request.job):
                    self._attempt = None
                    self._give_up(attempt)
                # Answered also where the job itself never came: the trainer was interrupted before it was sent.
                self._send(Failed(request.job, StagingError("the save was given up while it was staged")))
            case Seal() if attempt := self._current(request.job):
                self._attempt = None
                self._finish(attempt)

    def _adopting(self, job: Job) -> Job:
        """The job, as a comparison where a writer before us published the very checkpoint, and died."""
        if self._run is None or job.compare_with is not None:
            return job
        published = [info for info in self._run.view.checkpoints if info.step == job.step and info.seq > job.newest]
        return replace(job, compare_with=published[-1], adopts=True) if published else job

    def _begin(self, job: Job) -> _Attempt:
        return _Attempt(job, self._storage, self._disk, lambda: self._send(Working(job.number)))

    def _give_up(self, attempt: _Attempt) -> None:
        attempt.close()
        if attempt.has_folder and self._run is not None:
            self._run.discard(attempt.folder)

    def _current(self, job: int) -> _Attempt | None:
        return self._attempt if self._attempt is not None and self._attempt.job.number == job else None

    def _open(self, request: OpenRun) -> None:
        if self._run is not None:
            self._run.go_on_from(request.restored)
            self._send(Opened(request.number, self._run.view))
            return

        def take() -> RunFolder:
            return RunFolder(
                self._storage,
                self._owner,
                restored=request.restored,
                adopt=request.adopt,
                alive=lambda: self._send(Working(0)),
            )

        def told(error: BaseException, pause: float) -> None:
            _log.warning("%s could not be opened: %s. Trying again in %g s", self._storage.description, error, pause)

        try:
            self._run = with_retries(take, limits.RETRY_SECONDS, _may_pass, told)
        except Exception as error:
            self._send(Refused(request.number, error))
            return
        self._send(Opened(request.number, self._run.view))

    def _finish(self, attempt: _Attempt) -> None:
        job, run = attempt.job, self._run
        assert run is not None  # the trainer opens the run before it sends a job
        try:
            committed = (
                self._publish(run, attempt)
                if job.compare_with is None
                else self._compare(run, attempt, job.compare_with)
            )
        except Exception as error:
            if isinstance(error.__cause__, Busy):
                # The lock is lost: the next save takes the folder anew, if nobody else has it.
                run.close()
                self._run = None
            self._send(Failed(job.number, _as_save_error(error, job)))
            return
        # First this, then the retirement: nobody waits for old files to be deleted to hear of the new one.
        self._send(committed)
        if committed.fresh:
            run.retire(job.retention, job.replaces, job.bad, lambda: self._send(Working(job.number)))
        self._send(Retired(job.number, run.view))

    def _publish(self, run: RunFolder, attempt: _Attempt) -> Committed:
        """Commit what was staged; where the storage is unavailable for a while, in a later attempt."""
        job = attempt.job
        attempts = iter([attempt])

        def one_attempt() -> CheckpointInfo:
            current = next(attempts, None) or self._take_again(job)
            try:
                return _commit(run, current, current.write_out())
            except BaseException:
                self._give_up(current)
                raise

        # With a budget smaller than the state the first chunks are gone by now.
        info = self._retrying(job, one_attempt, limits.RETRY_SECONDS if job.staged_whole else ())
        try:
            self._retrying(job, run.mark, limits.RETRY_SECONDS)
        except MidstrideError as error:
            # The checkpoint stays: with its manifest away and the mark perhaps in place, a run that lost
            # nothing would look like one that lost everything.
            raise CommitError(
                f"step {job.step} is stored as {info.name}, but the run's folder could not be marked: {error}. "
                "The checkpoint can be restored; the next save tries again"
            ) from error
        return Committed(job.number, info, run.view, fresh=True)

    def _take_again(self, job: Job) -> _Attempt:
        # A new folder and new files: after a failed sync nothing is known of what the old ones hold.
        attempt = self._begin(job)
        for number, chunk in enumerate(job.plan.chunks):
            attempt.take(Staged(job.number, number, chunk.place))
            self._send(Emptied(job.number, chunk.place, chunk.nbytes))
        return attempt

    def _retrying(self, job: Job, action: Callable[[], _T], pauses: Sequence[float]) -> _T:
        def told(error: BaseException, pause: float) -> None:
            _log.warning("step %d could not be saved: %s. Trying again in %g s", job.step, error, pause)
            self._send(Retrying(job.number, error))

        return with_retries(action, pauses, _may_pass, told)

    def _compare(self, run: RunFolder, attempt: _Attempt, info: CheckpointInfo) -> Committed:
        attempt.raise_failure()
        saved = self._retrying(attempt.job, lambda: run.manifest(info), limits.RETRY_SECONDS)
        now = [(dtype, shape, lib, digest) for (dtype, shape, lib), digest in attempt.array_digests()]
        then = [(a.dtype, a.shape, a.lib, a.slices[0].digest if len(a.slices) == 1 else None) for a in saved.arrays]
        same_tree = attempt.job.tree_json == json.dumps(saved.tree, separators=(",", ":"), allow_nan=False)
        if not same_tree or now != then:
            raise StepExists(
                f"step {info.step} is saved already in {info.name}, with other content. Nothing was written; "
                "pass overwrite=True to replace it"
            )
        # It is said to be saved, so at least its files must be there.
        self._retrying(attempt.job, lambda: run.check_files(info, saved), limits.RETRY_SECONDS)
        self._retrying(attempt.job, run.mark, limits.RETRY_SECONDS)
        return Committed(attempt.job.number, info, run.view, fresh=attempt.job.adopts)


def _commit(run: RunFolder, attempt: _Attempt, draft: Manifest) -> CheckpointInfo:
    try:
        return run.publish(attempt.folder, draft, attempt.job.tree_json)
    except MidstrideError as error:
        raise CommitError(
            f"step {draft.step} was written but could not be published: {error}. Earlier checkpoints are untouched"
        ) from error


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, Unavailable) or isinstance(error.__cause__, Unavailable)


def _as_save_error(error: Exception, job: Job) -> Exception:
    if isinstance(error, MidstrideError) and not isinstance(error, StorageError):
        return error
    what = error if isinstance(error, StorageError) else repr(error)
    failure = WriteError(f"step {job.step} could not be saved: {what}. Earlier checkpoints are untouched")
    failure.__cause__ = error
    return failure


class _Attempt:
    """One try to write one checkpoint, in a folder of its own.

    A failure is kept until the seal: the trainer may be staging, and its chunks must still be taken.
    """

    def __init__(self, job: Job, storage: Storage, disk: Worker, alive: Callable[[], None]) -> None:
        self.job = job
        self._storage = storage
        self._disk = disk
        self._alive = alive
        self._digester = Digester(job.plan.files)
        self._failure: Exception | None = None
        self._files: dict[int, WritableFile] = {}
        self._made = 0
        self._attempt = secrets.token_hex(4)
        self.folder = layout.step_folder(job.step, self._attempt)
        self.has_folder = False
        if job.compare_with is None:
            self._guard(self._begin)

    def _begin(self) -> None:
        self.has_folder = True  # though it fails: the answer alone may have been lost
        self._storage.make_folder(self.folder)
        self._make_files(OPEN_FILES_AHEAD)

    def _make_files(self, count: int) -> None:
        # Ahead of the first write, so that a full disk is found before time is spent; not all of
        # very many, since each is a descriptor.
        for number in range(self._made, min(count, len(self.job.plan.files))):
            file = self.job.plan.files[number]
            self._files[number] = self._storage.create_file(f"{self.folder}/{file.name}", file.size)
            self._made = number + 1

    def take(self, staged: Staged) -> None:
        """Digest and write one chunk; both are done when this returns."""
        self._guard(lambda: self._take(staged))

    def _take(self, staged: Staged) -> None:
        chunk = self.job.plan.chunks[staged.chunk]
        data = self.job.memory.bytes[staged.place : staged.place + chunk.nbytes]
        if self.job.compare_with is not None:
            self._digester.update(chunk, data)
            return
        self._make_files(chunk.file + 1)
        file = self._files[chunk.file]
        # The digest is computed while the disk works.
        written = self._disk.run(lambda: file.write(chunk.offset, data.data))
        try:
            self._digester.update(chunk, data)
        finally:
            written()
        if chunk.offset + chunk.nbytes == self.job.plan.files[chunk.file].size:
            self._finish_files(before=chunk.file - OPEN_FILES_AHEAD)

    def _finish_files(self, before: int) -> None:
        for number in [n for n in self._files if n < before]:
            self._files[number].sync()
            self._files.pop(number).close()
            self._alive()

    def write_out(self) -> Manifest:
        """Sync what was written and describe it. Raises what failed on the way."""
        self.raise_failure()
        files = self.job.plan.files
        self._make_files(len(files))
        self._finish_files(before=len(files))
        return Manifest(
            run="", seq=0, parent=None, step=self.job.step, attempt=self._attempt, created="",
            versions=self.job.versions, world=1, metrics=self.job.metrics, tree=None,
            arrays=self._arrays(), files=tuple(
                FileRecord(f.name, f.size, len(f.head), xxhash.xxh3_128_hexdigest(f.head)) for f in files
            ),
        )  # fmt: skip

    def _arrays(self) -> tuple[ArrayRecord, ...]:
        records: dict[int, ArrayRecord] = {}
        for number, file in enumerate(self.job.plan.files):
            for position, slot in enumerate(file.slots):
                dtype, shape, lib = self.job.plan.arrays[slot.leaf]
                digest, blocks = self._digester.of_slot(number, position)
                whole = Slice(number, slot.key, (0,) * len(shape), shape, slot.begin, slot.end, digest, blocks)
                records[slot.leaf] = ArrayRecord(dtype, shape, lib, (whole,))
        return tuple(records[leaf] for leaf in range(len(self.job.plan.arrays)))

    def array_digests(self) -> list[tuple[tuple[str, tuple[int, ...], str], str]]:
        """Each array's description and digest, in order."""
        return [((a.dtype, a.shape, a.lib), a.slices[0].digest) for a in self._arrays()]

    def raise_failure(self) -> None:
        """Raise what went wrong since the attempt began."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Let go of files that are open. What was written stays."""
        for file in self._files.values():
            with contextlib.suppress(MidstrideError):
                file.close()
        self._files.clear()

    def _guard(self, action: Callable[[], None]) -> None:
        if self._failure is None:
            try:
                action()
            except Exception as error:
                self._failure = error
