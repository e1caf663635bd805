"""What a checkpoint has and the state has not is never dropped without a word.

``restore(state)`` raises ``StateMismatch`` that names every saved item the state lacks; with ``strict=False``
they are listed in ``.warnings``. An object that is built later is restored by itself: ``restore({"scaler":
scaler}, only="scaler")``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from states import restore
from tests.exact import assert_same

import midstride as ms


def _early() -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def _late(early: dict[str, Any], scale: float) -> dict[str, Any]:
    return {
        "scaler": torch.amp.GradScaler("cpu", init_scale=scale),
        "scheduler": torch.optim.lr_scheduler.StepLR(early["optimizer"], 2),
        "average": torch.optim.swa_utils.AveragedModel(early["model"]),
    }


@pytest.fixture
def saved(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    early = _early()
    late = _late(early, 64.0)
    for _ in range(3):
        early["optimizer"].step()
        late["scheduler"].step()
    late["average"].update_parameters(early["model"])
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(3, {**early, **late})
    return early, late


def test_all_that_the_state_lacks_is_named(tmp_path: Path, saved: Any) -> None:
    live = _early()
    before = live["model"].weight.clone()
    with ms.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(ms.StateMismatch) as caught:
            ckpt.restore(live)
        for name in ("scaler", "scheduler", "average"):
            assert f"/{name}: is in the checkpoint, not in the state" in str(caught.value)
        assert torch.equal(live["model"].weight, before)


def test_late_objects_are_restored_when_they_are_there(tmp_path: Path, saved: Any) -> None:
    live = _early()
    with ms.Checkpointer(tmp_path) as ckpt:
        restored = ckpt.restore(live, strict=False)
        assert restored is not None and restored.step == 3
        assert len([w for w in restored.warnings if "is in the checkpoint, not in the state" in w]) == 3
        late = _late(live, 2.0)
        lr = live["optimizer"].param_groups[0]["lr"]
        assert ckpt.restore({"scaler": late["scaler"]}, only="scaler") is not None
        assert ckpt.restore({**live, **late}, only=["scheduler", "average"], step=3) is not None
        assert late["scaler"].get_scale() == 64.0
        assert_same(late["scheduler"].state_dict(), saved[1]["scheduler"].state_dict())
        assert_same(dict(late["average"].state_dict()), dict(saved[1]["average"].state_dict()))
        assert live["optimizer"].param_groups[0]["lr"] == lr == saved[0]["optimizer"].param_groups[0]["lr"]
        assert_same(live["optimizer"].state_dict(), saved[0]["optimizer"].state_dict())
        info = ckpt.save(4, {**live, **late}).result()
        assert info.parent == restored.info.seq  # it is the same run that goes on
    assert set(restore(tmp_path).state) == {*live, *late}


def test_what_is_asked_for_and_not_saved_is_named(tmp_path: Path, saved: Any) -> None:
    live = _early()
    early_stop = {"patience": 3}
    with ms.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(ms.StateMismatch, match="/stop: is not in the checkpoint"):
            ckpt.restore({"stop": early_stop}, only="stop")
        restored = ckpt.restore({**live, "stop": early_stop}, strict=False)
        assert restored is not None and restored.state["stop"] == {"patience": 3}
        assert any("/stop: is not in the checkpoint" in warning for warning in restored.warnings)
        with pytest.raises(ValueError, match="names no top-level item"):
            ckpt.restore(live, only="scaler")
