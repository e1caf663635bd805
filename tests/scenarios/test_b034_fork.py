"""Children that are forked while a save is in flight neither hang nor touch the save.

In a child ``latest()`` works and ``save()`` says that it is a child; whether it ends by ``os._exit``
or runs its exit handlers, the parent's save is not ended, committed or cleaned up by it. The parent's save commits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from children import run_well
from helpers import short_or_long

import midstride as ms

_FORK = """
    import os, sys, threading
    import numpy as np
    import midstride as ms
    import hooked
    from helpers import exit_with_latest
    from hooked import Gate, HookedStorage
    from midstride.errors import SaveError
    from midstride.storage import open_storage

    hooked.WAIT_SECONDS = 600  # the children start while the gate is closed
    log = []  # operations of this process: (pid, operation)
    gate = Gate(sys.argv[2])
    def hook(operation, name):
        log.append((os.getpid(), operation))
        if name.startswith("step-000000000002"):
            gate(operation, name)

    path = sys.argv[1]
    state = {"model": {"w": np.arange(100_000)}}
    ckpt = ms.Checkpointer(HookedStorage(open_storage(path), hook))
    ckpt.save(1, state).result()
    pending = ckpt.save(2, {"model": {"w": np.arange(100_000) * 2}})
    assert gate.reached.wait(60)
    before = {p: sorted(os.listdir(os.path.join(path, p))) for p in os.listdir(path) if p.startswith("step-")}
    assert len(before) == 2

    def in_child():
        assert ckpt.latest().step == 1 and [i.step for i in ckpt.checkpoints()] == [1]
        assert (ckpt.restore().state["model"]["w"] == np.arange(100_000)).all()
        for refused in (lambda: ckpt.save(3, state), lambda: ckpt.step(3, state), pending.result):
            try:
                refused()
            except SaveError as error:
                assert "forked child" in str(error)
            else:
                raise AssertionError("a child saved")
        ckpt.wait()
        ckpt.close()
        writing = {"make_folder", "create_file", "write", "sync", "rename", "remove_file", "remove_folder", "lock"}
        assert not [entry for entry in log if entry[0] == os.getpid() and entry[1] in writing]
        # A Checkpointer of its own, in a folder of its own, works.
        with ms.Checkpointer(f"{path}-child-{os.getpid()}") as own:
            own.save(1, state)

    for way in ("exit", "_exit", "exit without a look", "raise"):
        child = os.fork()
        if child == 0:
            if way == "exit without a look":
                sys.exit(0)
            try:
                in_child()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(99)
            if way == "raise":
                sys.stderr = open(os.devnull, "w")
                raise KeyError("a child's own")
            if way == "exit":
                sys.exit(0)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == (1 if way == "raise" else 0), (way, status)
        now = {p: sorted(os.listdir(os.path.join(path, p))) for p in os.listdir(path) if p.startswith("step-")}
        assert now == before, "a child touched what the parent is writing"
        assert not pending.done()

    import multiprocessing
    others = []
    for method in ("spawn", "forkserver"):
        for way in sys.argv[3].split():
            child = multiprocessing.get_context(method).Process(target=exit_with_latest, args=(path, way))
            child.start()
            others.append(child)
    for child in others:
        child.join(60)
        assert child.exitcode == 11, "saw step 1, and ended"
    assert not pending.done()
    gate.open()
    assert pending.result(60).step == 2
    ckpt.save(3, state)
    ckpt.close()
    print("parent done")
"""


@pytest.mark.parametrize(
    "operation, ways",
    short_or_long(
        short=[("write", "exit")],
        long=[(operation, "exit _exit") for operation in ("create_file", "write", "sync", "rename")],
    ),
)
def test_plain_fork(tmp_path: Path, operation: str, ways: str) -> None:
    run = tmp_path / "run"
    assert run_well(_FORK, run, operation, ways).split() == ["parent", "done"], (
        "printed once: no child ran on as the parent"
    )
    reader = ms.open(run)
    assert [info.step for info in reader.checkpoints()] == [1, 2, 3]
    assert all(problems == [] for problems in reader.verify().values())
    assert (reader.load(2)["model"]["w"][:5] == [0, 2, 4, 6, 8]).all()


_LOADER = """
    import os, sys
    import torch
    import hooked
    import midstride as ms
    from helpers import LatestSeen
    from hooked import Gate, HookedStorage
    from midstride.errors import SaveError
    from midstride.storage import open_storage
    from torch.utils.data import DataLoader

    hooked.WAIT_SECONDS = 600  # the workers start while the gate is closed
    gate = Gate()
    def hook(operation, name):
        if name.startswith("step-000000000002"):
            gate(operation, name)

    path, workers, items, epochs = sys.argv[1], *map(int, sys.argv[2:5])
    model = torch.nn.Linear(200, 200)
    ckpt = ms.Checkpointer(HookedStorage(open_storage(path), hook))
    ckpt.save(1, {"model": model}).result()
    pending = ckpt.save(2, {"model": model})
    assert gate.reached.wait(60)

    class Forked(LatestSeen):
        def latest_step(self):
            try:
                ckpt.save(9, {"model": model})
            except SaveError:
                return ckpt.latest().step

    for method in sys.argv[5].split():
        kind = Forked if method == "fork" else LatestSeen
        def batches(dies_at=None):
            data = kind(path, items, dies_at)
            return DataLoader(data, num_workers=workers, batch_size=2, multiprocessing_context=method)
        for epoch in range(epochs):
            columns = [torch.cat(parts).tolist() for parts in zip(*batches())]
            assert columns[0] == list(range(items))
            assert set(columns[1]) == {1}
            assert os.getpid() not in columns[2] and len(set(columns[2])) == workers
        if sys.argv[6] == "and die":
            try:
                list(batches(dies_at=items - 1))
            except (RuntimeError, OSError, EOFError):
                pass  # the loader's own, or that of the pipe it was reading
            else:
                raise AssertionError("a worker's end was not noticed")
    assert not pending.done()
    gate.open()
    assert pending.result(60).step == 2
    ckpt.close()
"""


@pytest.mark.parametrize(
    "workers, items, epochs, methods, ends",
    short_or_long(
        short=[(2, 8, 2, "fork", "normally")],
        long=[(4, 64, 5, "fork", "and die"), (4, 64, 2, "spawn forkserver", "and die")],
    ),
)
def test_data_loader_workers(tmp_path: Path, workers: int, items: int, epochs: int, methods: str, ends: str) -> None:
    run_well(_LOADER, tmp_path / "run", workers, items, epochs, methods, ends)
    reader = ms.open(tmp_path / "run")
    assert [info.step for info in reader.checkpoints()] == [1, 2]
    assert all(problems == [] for problems in reader.verify().values())
