"""The public names, their signatures, and what importing costs."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import midstride as ms


def test_names_are_sorted_distinct_and_there() -> None:
    assert ms.__all__ == sorted(set(ms.__all__), key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    for name in ms.__all__:
        assert getattr(ms, name) is not None
    assert set(ms.__all__) <= set(dir(ms))
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        ms.nothing_of_the_kind  # noqa: B018


def test_signatures_that_users_rely_on() -> None:
    parameters = inspect.signature(ms.Checkpointer).parameters
    defaults = {
        "every": None, "keep": None, "busy": "skip", "staging_bytes": None, "engine": None, "snapshot": "copy",
        "listeners": (), "existing": "error", "fallback": True, "max_failures": 0,
    }  # fmt: skip
    assert list(parameters) == ["path", *defaults]
    assert {name: parameters[name].default for name in defaults} == defaults
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in defaults)
    for method, names in {
        "step": ["self", "step", "state", "metrics"],
        "save": ["self", "step", "state", "metrics", "overwrite"],
        "wait": ["self", "timeout"],
        "close": ["self", "timeout"],
        "best": ["self", "metric", "mode"],
    }.items():
        assert list(inspect.signature(getattr(ms.Checkpointer, method)).parameters) == names
    assert list(inspect.signature(ms.Checkpointer.restore).parameters)[:3] == ["self", "state", "step"]
    assert list(inspect.signature(ms.RunReader.load).parameters) == ["self", "step", "only"]


def test_importing_loads_no_framework_and_not_even_numpy() -> None:
    script = (
        "import sys, midstride\n"
        "heavy = {'torch', 'jax', 'tensorflow', 'numpy', 'typer', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "midstride.Checkpointer, midstride.open, midstride.RNG\n"
        "assert not (heavy - {'numpy'}) & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_writer_loads_no_framework() -> None:
    script = (
        "import sys, midstride.save.writer\n"
        "assert not {'torch', 'jax', 'tensorflow', 'midstride.checkpointer', 'midstride.state_torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("busy", "queue", ValueError),
        ("engine", "fibre", ValueError),
        ("snapshot", "auto", ValueError),
        ("existing", "overwrite", ValueError),
        ("max_failures", -1, ValueError),
        ("max_failures", True, TypeError),
        ("staging_bytes", 10, ValueError),
        ("every", 0, ValueError),
        ("every", "ten minutes", ValueError),
        ("every", 1.5, TypeError),
        ("keep", 0, ValueError),
        ("keep", True, TypeError),
    ],
)
def test_wrong_arguments_are_refused_at_once(argument: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"(?i){argument}"):
        ms.Checkpointer("runs/never-made", **{argument: value})  # type: ignore[arg-type]


def test_a_path_of_the_wrong_kind() -> None:
    with pytest.raises(TypeError, match="folder"):
        ms.Checkpointer(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="object stores"):
        ms.Checkpointer("s3://bucket/run")
