"""Children that are forked while a save is in flight neither hang nor touch the save.

In a child ``latest()`` works and ``save()`` says that it is a child; whether it ends by ``os._exit``
or runs its exit handlers, the parent's save is not ended, committed or cleaned up by it. The parent's save commits.
"""

from __future__ import annotations

from pathlib import Path

from children import run_well

import midstride as ms

_FORK = """
    import os, sys, threading
    import numpy as np
    import midstride as ms
    from hooked import Gate, HookedStorage
    from midstride.errors import SaveError
    from midstride.storage import open_storage

    log = []  # operations of this process: (pid, operation)
    gate = Gate()
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
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(1) as pool:
            assert pool.apply(os.path.exists, (path,))
    gate.open()
    assert pending.result(60).step == 2
    ckpt.save(3, state)
    ckpt.close()
    print("parent done")
"""


def test_plain_fork(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_well(_FORK, run).split() == ["parent", "done"], "printed once: no child ran on as the parent"
    reader = ms.open(run)
    assert [info.step for info in reader.checkpoints()] == [1, 2, 3]
    assert all(problems == [] for problems in reader.verify().values())
    assert (reader.load(2)["model"]["w"][:5] == [0, 2, 4, 6, 8]).all()


_LOADER = """
    import os, sys
    import torch
    import midstride as ms
    from hooked import Gate, HookedStorage
    from midstride.errors import SaveError
    from midstride.storage import open_storage

    gate = Gate()
    def hook(operation, name):
        if name.startswith("step-000000000002"):
            gate(operation, name)

    model = torch.nn.Linear(200, 200)
    ckpt = ms.Checkpointer(HookedStorage(open_storage(sys.argv[1]), hook))
    ckpt.save(1, {"model": model}).result()
    pending = ckpt.save(2, {"model": model})
    assert gate.reached.wait(60)

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            latest = ckpt.latest().step
            try:
                ckpt.save(9, {"model": model})
                refused = 0
            except SaveError:
                refused = 1
            return torch.tensor([index, latest, refused, os.getpid()])

    loader = torch.utils.data.DataLoader(Data(), num_workers=2, batch_size=2, multiprocessing_context="fork")
    for epoch in range(2):
        seen = torch.cat(list(loader))
        assert seen[:, 0].tolist() == list(range(8))
        assert (seen[:, 1] == 1).all() and (seen[:, 2] == 1).all()
        assert os.getpid() not in seen[:, 3].tolist() and len(set(seen[:, 3].tolist())) == 2
    assert not pending.done()
    gate.open()
    assert pending.result(60).step == 2
    ckpt.close()
"""


def test_data_loader_workers(tmp_path: Path) -> None:
    run_well(_LOADER, tmp_path / "run")
    reader = ms.open(tmp_path / "run")
    assert [info.step for info in reader.checkpoints()] == [1, 2]
    assert all(problems == [] for problems in reader.verify().values())
