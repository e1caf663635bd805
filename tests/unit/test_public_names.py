"""Public names are looked up late: each is there all the same, for users, for ``dir`` and for type checkers."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import midstride as ms


@pytest.mark.parametrize("name", ms.__all__)
def test_every_name_resolves_to_what_its_home_has(name: str) -> None:
    value = getattr(ms, name)
    assert getattr(importlib.import_module(value.__module__), name) is value
    assert value.__doc__


def test_dir_shows_names_that_were_never_used() -> None:
    code = "import midstride; print(set(midstride.__all__) <= set(dir(midstride)), 'Checkpointer' in vars(midstride))"
    assert _python(code) == "True False"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Chekpointer'"):
        _ = ms.Chekpointer  # type: ignore[attr-defined]
    assert not hasattr(ms, "torch_adapter")


def test_star_import_gives_the_names() -> None:
    assert _python("from midstride import *; print(Checkpointer.__name__, open.__module__)") == (
        "Checkpointer midstride.reader"
    )


FRAMEWORKS = "{'torch', 'jax', 'tensorflow', 'keras', 'lightning', 'transformers', 'typer', 'rich'}"


def test_using_every_name_loads_no_framework() -> None:
    code = (
        "import sys, midstride\n"
        "for name in midstride.__all__: getattr(midstride, name)\n"
        f"print(sorted({FRAMEWORKS} & set(sys.modules)))"
    )
    assert _python(code) == "[]"


def test_a_type_checker_sees_the_names(tmp_path: Path) -> None:
    user = tmp_path / "user.py"
    user.write_text(
        "import midstride as ms\n"
        + "".join(f"ms.{name}\n" for name in ms.__all__)
        + "def main(ckpt: ms.Checkpointer) -> int | None:\n"
        "    pending = ckpt.step(1, {}, metrics={'loss': 1.0})\n"
        "    return pending.result().step if pending is not None else None\n"
        "reveal_type(ms.Checkpointer('x').latest())\n"
    )
    source = Path(ms.__file__).resolve().parents[1]
    # The package itself is checked by `make check`; here only what its user sees.
    (tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = silent\n[mypy-torch.*]\nfollow_imports = skip\n")
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "user.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(source), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert "CheckpointInfo | None" in ended.stdout, ended.stdout + ended.stderr
    assert ended.returncode == 0, ended.stdout
    assert (source / "midstride" / "py.typed").exists()


def _python(code: str) -> str:
    source = str(Path(ms.__file__).resolve().parents[1])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
