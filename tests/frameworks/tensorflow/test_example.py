"""The example runs as its first lines say: twice, and the second run goes on where the first one ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

from midstride.tensorflow import CheckpointFolder

SCRIPT = Path(__file__).parents[3] / "examples" / "tensorflow_hook.py"


def run_example(folder: Path, steps: int) -> str:
    command = [sys.executable, str(SCRIPT), "--run", str(folder), "--steps", str(steps), "--every", "10"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    )
    return done.stdout


def values_of(folder: Path, step: int) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(folder / f"model.ckpt-{step}"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


@pytest.mark.timeout(600)  # three processes that import TensorFlow
def test_example_resumes_and_ends_bit_equal(tmp_path: Path) -> None:
    first = run_example(tmp_path / "run", 14)
    assert "at step 0\n" in first
    second = run_example(tmp_path / "run", 25)
    assert f"{tmp_path / 'run' / 'model.ckpt-14'}\nat step 14\n" in second
    assert "step 20: loss" in second
    folder = CheckpointFolder(tmp_path / "run")
    assert [info.step for info in folder.checkpoints()] == [0, 10, 14, 20, 25]
    assert not any(folder.verify().values())

    run_example(tmp_path / "uninterrupted", 25)
    resumed, whole = values_of(tmp_path / "run", 25), values_of(tmp_path / "uninterrupted", 25)
    assert resumed.keys() == whole.keys()
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)
