"""From what a caller names to a storage: paths of every kind, storages as they are, and nothing by mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import midstride as ms
from midstride.storage import open_storage


class Place:
    def __init__(self, path: str | bytes) -> None:
        self._path = path

    def __fspath__(self) -> str | bytes:
        return self._path


def test_paths_and_storages(tmp_path: Path) -> None:
    text = str(tmp_path / "run")
    for path in (text, Path(text), Place(text), Place(os.fsencode(text))):
        found = open_storage(path)  # type: ignore[arg-type]
        assert isinstance(found, ms.LocalStorage)
        assert found.description == text
    memory = ms.MemoryStorage()
    assert open_storage(memory) is memory
    assert os.listdir(tmp_path) == []  # nothing is made


@pytest.mark.parametrize("address", ["s3://bucket/run", "gs://b", "az://b/x", "https://host/x", "weird+x://y"])
def test_addresses_are_refused_and_make_no_folder(address: str) -> None:
    for path in (address, Path(address)) if "+" not in address else (address,):
        with pytest.raises(ValueError, match="object store"):
            open_storage(path)


def test_a_folder_with_such_a_name_further_down_is_a_folder() -> None:
    assert open_storage("/data/s3://b").description == "/data/s3:/b"


@pytest.mark.parametrize("thing", [None, 7, b"run", ["run"], object()])
def test_anything_else_is_a_type_error(thing: object) -> None:
    with pytest.raises(TypeError, match="a str, a Path or a Storage"):
        open_storage(thing)  # type: ignore[arg-type]
