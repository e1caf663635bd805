"""A restore that fails can be tried again, fails the same way each time, and leaves no debris.

Shapes and sizes are checked before anything is changed. Arrays that come back in ``.state`` leave the
caller's untouched. Objects that are filled in place may be half filled when a byte is found bad:
then ``save()`` refuses them until a restore has made them whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import flip_bit, folder_of, values_in
from hooked import HookedStorage

import midstride as ms
from midstride.errors import Unavailable
from midstride.format.datafile import header_nbytes, parse_header
from midstride.storage import open_storage

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

SIZES = range(1001, 1011)  # ten parameters, each of another size


def _model(value: float) -> Any:
    return torch.nn.ParameterList(torch.full((size,), float(value)) for size in SIZES)


def _values(model: Any) -> set[float]:
    return set().union(*(set(p.detach().unique().tolist()) for p in model))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": _model(step), "plain": {"w": np.full(10, float(step))}})
    return tmp_path / "run"


def _damage_seventh(run: Path) -> None:
    file = folder_of(run, 2) / "model.safetensors"
    raw = file.read_bytes()
    header = raw[: header_nbytes(raw, len(raw))]
    flip_bit(file, parse_header(header, len(raw))["6"].begin + 5)


def _listing(run: Path) -> dict[str, int]:
    return {str(path.relative_to(run)): path.stat().st_size for path in run.rglob("*") if path.is_file()}


def test_seventh_is_corrupt(run: Path) -> None:
    _damage_seventh(run)
    before = _listing(run)
    model, plain = _model(0), {"w": np.zeros(10)}
    with ms.Checkpointer(run, fallback=False) as ckpt:
        for _ in range(3):
            with pytest.raises(ms.CorruptCheckpoint, match=r"step 2 .*array /model/6 differ"):
                ckpt.restore({"model": model, "plain": plain})
            assert values_in(plain) == {0}
            with pytest.raises(ms.StagingError, match="not whole, nothing was saved"):
                ckpt.save(3, {"model": model})
        assert _listing(run) == before, "no debris"
        restored = ckpt.restore({"model": model, "plain": {"w": np.zeros(10)}}, step=1)
        assert restored is not None and _values(model) == {1}
        ckpt.save(3, {"model": model, "plain": plain})
    assert values_in(ms.open(run).load(3)["model"]) == {1}


def test_fallback_makes_the_objects_whole(run: Path) -> None:
    _damage_seventh(run)
    model = _model(0)
    with ms.Checkpointer(run) as ckpt:
        restored = ckpt.restore({"model": model, "plain": {"w": np.zeros(10)}})
        assert restored is not None and restored.step == 1 and "/model/6" in restored.warnings[0]
        assert _values(model) == {1}
        ckpt.save(2, {"model": model})
    assert values_in(ms.open(run).load(2)) == {1}


def test_without_live_objects_nothing_is_touched(run: Path) -> None:
    _damage_seventh(run)
    arrays = {"model": {str(n): np.zeros(size, np.float32) for n, size in enumerate(SIZES)}}
    with ms.Checkpointer(run, fallback=False) as ckpt:
        for _ in range(3):
            with pytest.raises(ms.CorruptCheckpoint, match=r"array /model/6 differ"):
                ckpt.restore(arrays, only="model")
            assert values_in(arrays) == {0}
        restored = ckpt.restore(arrays, step=1, only="model")
        assert restored is not None and values_in(restored.state) == {1}
        assert ckpt.save(3, restored.state).result().step == 3, "arrays of the caller's were never half filled"


@pytest.mark.parametrize("wrong", ["shape", "name", "dtype"])
def test_seventh_does_not_fit(run: Path, wrong: str) -> None:
    model = _model(0)
    if wrong == "shape":
        model[6] = torch.nn.Parameter(torch.zeros(5))
        problem = r"/model/6: the checkpoint has shape \[1007\], the state wants \[5\]"
    elif wrong == "dtype":
        model[6] = torch.nn.Parameter(torch.zeros(1007, dtype=torch.float64))
        problem = r"/model/6: the checkpoint has dtype float32, the state wants float64"
    else:
        model.append(torch.zeros(3))
        problem = r"/model/10: is not in the checkpoint"
    with ms.Checkpointer(run, existing="continue") as ckpt:
        for _ in range(3):
            with pytest.raises(ms.StateMismatch, match=problem):
                ckpt.restore({"model": model}, only="model")
            assert _values(model) == {0}, "all is checked before anything is changed"
        ckpt.save(3, {"model": model}).result()  # nothing was changed, so nothing is refused


@pytest.mark.parametrize("operation", ["read", "open_file"])
@pytest.mark.parametrize("in_place", [True, False])
def test_storage_is_away_for_a_while(run: Path, operation: str, in_place: bool) -> None:
    away = [True, True]
    seen: list[str] = []

    def hook(now: str, name: str) -> None:
        if now == operation and name.endswith("model.safetensors") and "0002-" in name:
            seen.append(name)
            # Past what the catalog looks at: the reading itself fails.
            if away and len(seen) > (1 if operation == "read" else 2):
                raise Unavailable("injected: the mount is away")

    before = _listing(run)
    model = _model(0) if in_place else {str(n): np.zeros(size, np.float32) for n, size in enumerate(SIZES)}
    with ms.Checkpointer(HookedStorage(open_storage(run), hook)) as ckpt:
        while away:
            seen.clear()
            with pytest.raises(Unavailable, match="the mount is away"):
                ckpt.restore({"model": model}, only="model")
            away.pop()
        assert _listing(run) == before
        if in_place and operation == "read":
            with pytest.raises(ms.StagingError, match="not whole"):
                ckpt.save(3, {"model": model})
        restored = ckpt.restore({"model": model}, only="model")
        assert restored is not None and restored.step == 2 and restored.warnings == ()
        assert (_values(model) if in_place else values_in(restored.state)) == {2}
        # An older step goes into the same objects.
        older = ckpt.restore({"model": model}, step=1, only="model")
        assert older is not None
        assert (_values(model) if in_place else values_in(older.state)) == {1}


def test_interrupted_while_reading(run: Path) -> None:
    reads: list[str] = []

    def hook(now: str, name: str) -> None:
        if now == "read" and name.endswith("model.safetensors"):
            reads.append(name)
            if len(reads) == 2:
                raise KeyboardInterrupt

    model = _model(0)
    with ms.Checkpointer(HookedStorage(open_storage(run), hook)) as ckpt:
        with pytest.raises(KeyboardInterrupt):
            ckpt.restore({"model": model}, only="model")
        with pytest.raises(ms.StagingError, match="not whole"):
            ckpt.save(3, {"model": model})
        restored = ckpt.restore({"model": model}, only="model")
        assert restored is not None and restored.step == 2 and _values(model) == {2}


def test_object_that_refuses_half_way(run: Path) -> None:
    class Picky:
        def __init__(self) -> None:
            self.refuse = True
            self.w = np.zeros(10)

        def state_dict(self) -> dict[str, Any]:
            return {"w": self.w}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.w = state["w"]
            if self.refuse:
                raise ValueError("not today")

    picky = Picky()
    with ms.Checkpointer(run) as ckpt:
        for _ in range(3):
            with pytest.raises(ms.StateMismatch, match="refused its state: ValueError\\('not today'\\)"):
                ckpt.restore({"plain": picky}, only="plain")
            with pytest.raises(ms.StagingError, match="not whole"):
                ckpt.save(3, {"plain": picky})
        picky.refuse = False
        assert ckpt.restore({"plain": picky}, only="plain") is not None
        ckpt.save(3, {"plain": picky}).result()


def test_another_restore_does_not_make_it_whole(run: Path) -> None:
    class Refusing:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("not today")

    refusing = Refusing()
    with ms.Checkpointer(run) as ckpt:
        name = next(iter(ckpt.restore().state))  # type: ignore[union-attr]
        with pytest.raises(ms.StateMismatch, match="not today"):
            ckpt.restore({name: refusing}, only=name)
        assert ckpt.restore() is not None
        with pytest.raises(ms.StagingError, match="not whole"):
            ckpt.save(9, {name: refusing})
