"""A run's folder in the hands of its writer: the lock, the run's id, the lineage, the debris."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from datetime import UTC, datetime

from midstride.errors import Busy, ForeignRun, NewerFormat
from midstride.format import layout
from midstride.format.manifest import Manifest
from midstride.info import CheckpointInfo
from midstride.restore.catalog import Catalog, Known, check_sizes, info_of, lineage, read_manifest, scan
from midstride.retention import Retention, to_retire
from midstride.save import commit
from midstride.save.messages import RunView
from midstride.save.predecessor import Patience
from midstride.storage.base import Lock, Storage

_log = logging.getLogger("midstride")


def _take_lock(storage: Storage, owner: str, alive: Callable[[], None]) -> Lock:
    """The lock at once, or when the writer of a run that died has finished what that had staged."""
    patience = Patience(storage.description)
    while True:
        try:
            return storage.lock(layout.LOCK, owner)
        except Busy as busy:
            if busy.left_at is None or not patience.wait(busy.left_at):
                raise
        alive()


class RunFolder:
    """The one that may write in the folder. Everything here happens under the lock."""

    def __init__(
        self,
        storage: Storage,
        owner: str,
        *,
        restored: CheckpointInfo | None,
        adopt: bool,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the lock and look around. ``alive`` is called now and then while the writer of a dead run is waited for.

        Raises ``Busy`` where another run holds the folder, ``ForeignRun`` where it has checkpoints
        that the caller neither restored nor said to continue, ``NewerFormat`` where a newer
        Midstride wrote here.
        """
        storage.make_root()
        self._storage = storage
        self._lock = _take_lock(storage, owner, alive)
        try:
            catalog = scan(storage)
            self._admit(catalog, adopt)
            self._restored = restored.seq if restored is not None else None
            self._settle(catalog)
        except BaseException:
            self._lock.release()
            raise

    def _admit(self, catalog: Catalog, adopt: bool) -> None:
        for entry in catalog.unusable:
            if isinstance(entry.problem, NewerFormat):
                raise entry.problem
        if catalog.ever_committed and not adopt:
            what = f"{len(catalog.checkpoints)} checkpoints" if catalog.checkpoints else "traces of a run"
            raise ForeignRun(
                f"{self._storage.description} holds {what} that this run neither made nor restored. Nothing was "
                "written. Call restore() first to go on from them, pass existing='continue' to write beside "
                "them, or choose another folder"
            )

    def _settle(self, catalog: Catalog) -> None:
        # What the last holder published may not have reached the disk when it died; what readers
        # were shown since then must not vanish.
        self._storage.sync_folder("")
        if catalog.latest is not None:
            self._storage.sync_folder(catalog.latest.name)
        # Step folders of ours that are to go: those that may have a manifest, and those that have none.
        # What cannot be removed now is tried again after each commit.
        self._unwanted: set[str] = set()
        self._debris = [name for name in catalog.debris if name not in catalog.links]
        self._sweep()
        self._marked = catalog.marked
        latest = catalog.latest.seq if catalog.latest is not None else None
        self._head = self._restored if self._restored is not None else latest
        self._run = catalog.run or uuid.uuid4().hex
        self._checkpoints = catalog.checkpoints
        # What is published from here on is ours, so this is looked up once.
        self._last_seq = catalog.last_seq
        # Kept up from here on, whatever is retired.
        self._line = {info.seq for info in lineage(self._checkpoints, self._head)}
        damaged = [entry.info for entry in catalog.unusable if entry.info is not None]
        self._known: Known = {info.name: info for info in (*catalog.checkpoints, *damaged)}
        # They keep their place in the order. They must not stand for a good one that is then deleted.
        self._damaged = {info.seq for info in damaged}

    @property
    def view(self) -> RunView:
        return RunView(self._run, self._head, frozenset(self._line), tuple(self._checkpoints))

    def go_on_from(self, restored: CheckpointInfo | None) -> None:
        """The run was restored while it was open: what is saved next grows from there."""
        if restored is not None:
            self._restored = self._head = restored.seq
            self._line = {info.seq for info in lineage(self._checkpoints, self._head)}

    def manifest(self, info: CheckpointInfo) -> Manifest:
        """The manifest of one of this folder's checkpoints."""
        return read_manifest(self._storage, info.name)

    def check_files(self, info: CheckpointInfo, manifest: Manifest) -> None:
        """Raise ``CorruptCheckpoint`` where a file of a checkpoint is not there or has another size."""
        check_sizes(self._storage, info.name, manifest)

    def publish(self, folder: str, draft: Manifest, tree_json: str) -> CheckpointInfo:
        """Give the checkpoint in ``folder`` its place in the order and commit it."""
        catalog = scan(self._storage, self._known)
        manifest = Manifest(
            run=self._run,
            # Above any that was tried: that attempt's manifest may still be there, unreadable for a while.
            seq=max(self._last_seq, self._restored or 0) + 1,
            parent=self._head,
            step=draft.step,
            attempt=draft.attempt,
            created=datetime.now(UTC).isoformat(timespec="microseconds"),
            versions=draft.versions,
            world=draft.world,
            metrics=draft.metrics,
            tree=None,
            arrays=draft.arrays,
            files=draft.files,
        )
        self._last_seq = manifest.seq
        commit.publish_manifest(self._storage, self._lock, folder, manifest, tree_json)
        info = info_of(manifest, folder)
        self._known[folder] = info
        self._checkpoints = [*(c for c in catalog.checkpoints if self._counts(c)), info]
        self._head = info.seq
        self._line = self._line & {known.seq for known in self._known.values()} | {info.seq}
        return info

    def _counts(self, info: CheckpointInfo) -> bool:
        return info.seq not in self._damaged and info.name not in self._unwanted

    def discard(self, folder: str) -> None:
        """Remove an attempt that failed, its manifest first: it may have got its name."""
        self._unwanted.add(folder)
        self._withdraw(folder)
        self._sweep()

    def mark(self) -> None:
        """Before the first "saved" is said: leave the mark that something was committed here."""
        if not self._marked:
            commit.mark_run(self._storage, self._run)
            self._marked = True

    def retire(
        self,
        policy: Retention | None,
        replaced: CheckpointInfo | None,
        bad: frozenset[int] = frozenset(),
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Delete what is not to be kept, and what earlier tries left. A failure is logged: it costs space,
        not the new checkpoint.

        ``alive`` is called before each one.
        """
        # One that is known to be bad must not stand for a good one that is then deleted.
        good = [info for info in self._checkpoints if info.seq not in bad]
        try:
            doomed = to_retire(policy, good) if policy is not None else []
        except Exception:  # a rule of the user's own: the checkpoint is committed all the same
            _log.exception("the retention rule %r failed: all checkpoints stay", policy)
            doomed = []
        if replaced is not None and replaced not in doomed:
            doomed = [replaced, *doomed]
        going = {info.name: info.step for info in self._without_links(doomed)}
        self._unwanted.update(going)
        self._checkpoints = [info for info in self._checkpoints if info.name not in self._unwanted]
        for name in sorted(self._unwanted):
            alive()
            if self._withdraw(name) and name in going:
                _log.info("retired step %d (%s)", going[name], name)
        self._sweep(alive)

    def _without_links(self, doomed: list[CheckpointInfo]) -> list[CheckpointInfo]:
        if not doomed:
            return []
        try:
            links = {entry.name for entry in self._storage.list_folder("") if entry.kind == "other"}
        except Exception as error:  # a storage's own too: the new checkpoint is committed all the same
            _log.warning("%s could not be listed: nothing was retired: %s", self._storage.description, error)
            return []
        for info in doomed:
            if info.name in links:
                _log.warning("%s is a link: not retired; remove it yourself", info.name)
        return [info for info in doomed if info.name not in links]

    def _withdraw(self, folder: str) -> bool:
        try:
            commit.withdraw(self._storage, folder)
        except Exception as error:  # a storage's own too: the new checkpoint is committed all the same
            _log.warning("%s/%s could not be removed: %s", self._storage.description, folder, error)
            return False
        self._unwanted.discard(folder)
        self._known.pop(folder, None)
        self._debris.append(folder)
        return True

    def _sweep(self, alive: Callable[[], None] = lambda: None) -> None:
        self._debris = commit.sweep(self._storage, self._debris, alive)

    def close(self) -> None:
        """Give the lock back."""
        self._lock.release()
