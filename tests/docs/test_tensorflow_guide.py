"""What the TensorFlow guide says is run, and what it lists is complete."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

import midstride as ms
from midstride.tensorflow import AsyncCheckpointSaverHook, CheckpointFolder, latest_checkpoint

v1 = tf.compat.v1
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "tensorflow.md"


def build_model() -> Any:
    """A train op; the average that the guide's listener looks at falls as one over the step."""
    step = v1.train.get_or_create_global_step()
    average = v1.get_variable("loss_average", [], initializer=v1.ones_initializer(), use_resource=True)
    added = v1.assign_add(step, 1)
    return tf.group(added, average.assign(1 / tf.cast(added, tf.float32)))


def run_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """All in one namespace, one after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"build_model": build_model, "ms": ms}
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, GUIDE.name, "exec"), names)
    return names


def test_the_guide_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        names = run_blocks(tmp_path, monkeypatch)
    finally:
        v1.summary.FileWriterCache.clear()
    assert Path(names["path"]).name == "model.ckpt-100"
    assert names["problems"]["model.ckpt-100"] == []
    assert latest_checkpoint("runs/digits") == str(Path("runs/digits/model.ckpt-130"))
    stopped_at = CheckpointFolder("runs/evaluated").checkpoints()[-1].step
    assert 20 < stopped_at < 1000, "the listener stopped it"
    assert names["done"].saves_committed >= 2
    assert names["done"].snapshot == "handles"


def test_every_option_of_ours_is_named() -> None:
    text = GUIDE.read_text()
    parameters = inspect.signature(AsyncCheckpointSaverHook.__init__).parameters.values()
    for option in (p for p in parameters if p.kind is p.KEYWORD_ONLY):
        assert re.search(rf"`{option.name}\b", text), option.name
        assert f"{option.name}:" in (AsyncCheckpointSaverHook.__init__.__doc__ or ""), option.name


def test_each_defect_of_the_old_hook_is_answered() -> None:
    """The table has as many rows as the imitation has defects."""
    from tests.frameworks.tensorflow import old_hook

    rows = re.search(r"^\| the old hook \|.*?\n\n", GUIDE.read_text(), re.M | re.S)
    assert rows is not None
    listed = re.findall(r"D\d+", (old_hook.__doc__ or "").partition("|---|---|")[2])
    assert len(rows[0].strip().splitlines()) - 2 == len(set(listed))
