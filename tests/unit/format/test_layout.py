"""Names on disk: made and parsed here, from an alphabet that every file system holds."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstride.format import layout


@given(st.integers(0, layout.MAX_STEP), st.from_regex(r"[0-9a-f]{8}", fullmatch=True))
def test_step_folders(step: int, attempt: str) -> None:
    name = layout.step_folder(step, attempt)
    assert layout.parse_step_folder(name) == layout.StepFolder(name, step, attempt)


def test_the_padding_means_nothing() -> None:
    assert layout.step_folder(500, "3f9c01a7") == "step-000000000500-3f9c01a7"
    for name in ("step-5-3f9c01a7", "step-0005-3f9c01a7"):
        parsed = layout.parse_step_folder(name)
        assert parsed is not None and (parsed.step, parsed.name) == (5, name)


@pytest.mark.parametrize(
    "name",
    [
        "", "step", "step-5", "step--3f9c01a7", "step--5-3f9c01a7", "step-5-3F9C01A7", "step-5-3f9c01a", "step-5-3f9c01a77",
        "Step-5-3f9c01a7", "step-5-3f9c01a7.tmp", "step-5-3f9c01a7\n", " step-5-3f9c01a7", "step-\u0665-3f9c01a7",
        "step-9223372036854775808-3f9c01a7", "step-99999999999999999999-3f9c01a7", "step-1_0-3f9c01a7", "step-1e3-3f9c01a7",
    ],
)  # fmt: skip
def test_other_names_are_not_ours(name: str) -> None:
    assert layout.parse_step_folder(name) is None


@given(st.lists(st.text() | st.integers() | st.none() | st.tuples(st.text()), max_size=12))
def test_stems_are_safe_and_differ(keys: list[object]) -> None:
    stems: set[str] = set()
    for key in keys:
        stem = layout.file_stem(key, stems)
        assert stem not in stems
        stems.add(stem)
        for name in (layout.data_file(stem, 1, 1), layout.data_file(stem, 2, 3), layout.index_file(stem)):
            assert layout.is_data_file(name), name
            assert len(name) <= 128 and name == name.lower() and not name.startswith((".", "-"))
        assert not re.fullmatch(r"con|prn|aux|nul|com[0-9]|lpt[0-9]", stem)


def test_a_plain_key_is_its_own_stem() -> None:
    assert layout.file_stem("model", set()) == "model"
    assert layout.file_stem("Model", {"model"}) == "model-2"
    assert layout.file_stem("model", {"model", "model-2"}) == "model-3"
    assert layout.file_stem("model-2", {"model", "model-2"}) == "model-2-2"
    assert layout.file_stem("", set()) == "item"
    assert layout.data_file("model", 2, 3) == "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    "name",
    ["../m.safetensors", "/m.safetensors", "a/b.safetensors", "a\\b.safetensors", ".safetensors", "..safetensors", "manifest.json",
     "m.safetensors\n", "m.safetensors.tmp", "M.safetensors", "m:s.safetensors", "m\0.safetensors", "-m.safetensors", "é.safetensors",
     "x" * 200 + ".safetensors"],
)  # fmt: skip
def test_names_that_a_manifest_may_not_have(name: str) -> None:
    assert not layout.is_data_file(name)


@given(st.lists(st.sampled_from(["a", "a#2", "a#3", "__metadata__", ""]), max_size=8))
def test_tensor_keys_are_unique(keys: list[str]) -> None:
    taken: set[str] = set()
    for key in keys:
        unique = layout.unique_tensor_key(key, taken)
        assert unique not in taken and unique != "__metadata__" and unique.startswith(key)
        taken.add(unique)
