"""Names of Keras's variables, and those that differ only in what Keras numbers. Needs no Keras."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstride.keras.names import automatic_stems, by_name, match_names

STEMS = ["dense", "sequential", "seed_generator"]


def test_equal_paths_are_told_apart_by_position_and_each_variable_is_named_once() -> None:
    first, second, third = (SimpleNamespace(path="block/kernel") for _ in range(3))
    own = SimpleNamespace(name="v:0")
    named = by_name([first, second, first, own, third])
    assert list(named) == ["block/kernel", "block/kernel#2", "v:0", "block/kernel#3"]
    assert list(named.values()) == [first, second, own, third]


@pytest.mark.parametrize(
    ("saved", "live", "matched"),
    [
        (["dense/w", "dense_1/w"], ["dense_1/w", "dense/w"], {"dense/w": "dense/w", "dense_1/w": "dense_1/w"}),
        (["dense/w", "dense_1/w"], ["dense_2/w", "dense_3/w"], {"dense/w": "dense_2/w", "dense_1/w": "dense_3/w"}),
        # Where some names are equal and stand for something else.
        (["dense/w", "dense_1/w"], ["dense_1/w", "dense_2/w"], {"dense/w": "dense_1/w", "dense_1/w": "dense_2/w"}),
        (
            ["sequential/dense/w", "sequential/dense_1/w", "seed_generator_3/s"],
            ["sequential_1/dense_7/w", "sequential_1/dense_8/w", "seed_generator_5/s"],
            {
                "sequential/dense/w": "sequential_1/dense_7/w",
                "sequential/dense_1/w": "sequential_1/dense_8/w",
                "seed_generator_3/s": "seed_generator_5/s",
            },
        ),
        # Steps between the numbers must be the same: another model was built in between, here or there.
        (["dense/w", "dense_2/w"], ["dense_5/w", "dense_7/w"], {"dense/w": "dense_5/w", "dense_2/w": "dense_7/w"}),
        (["dense/w", "dense_2/w"], ["dense_5/w", "dense_6/w"], {"dense/w": "dense_5/w"}),
        # Numbers that people gave are names like any other.
        (["block_1/w", "block_2/w"], ["block_2/w", "block_3/w"], {"block_2/w": "block_2/w"}),
        (["a/w"], ["b/w"], {}),
        ([], ["dense/w"], {}),
    ],
)
def test_matching(saved: list[str], live: list[str], matched: dict[str, str]) -> None:
    assert match_names(saved, live, STEMS) == matched


PARTS = st.sampled_from(["dense", "dense_1", "dense_2", "dense_10", "block", "block_1", "w"])
NAMES = st.lists(st.lists(PARTS, min_size=1, max_size=3).map("/".join), unique=True, max_size=8)


@given(NAMES, NAMES)
def test_no_two_names_match_the_same_one(saved: list[str], live: list[str]) -> None:
    matched = match_names(saved, live, STEMS)
    assert set(matched) <= set(saved) and set(matched.values()) <= set(live)
    assert len(set(matched.values())) == len(matched)


@given(NAMES)
def test_equal_names_match_themselves(names: list[str]) -> None:
    assert match_names(names, names[::-1], STEMS) == {name: name for name in names}


def test_what_keras_numbers_is_named_after_its_class() -> None:
    def part(cls: str, name: str) -> object:
        return type(cls, (), {"name": name})()

    parts = [part("Dense", "dense_4"), part("BatchNormalization", "batch_normalization"), part("Conv2D", "conv2d_1"),
             part("Dense", "head_1"), part("MyBlock", "my_block_2"), part("RMSprop", "rm_sprop")]  # fmt: skip
    assert automatic_stems(parts) == [
        "batch_normalization", "conv2d", "dense", "my_block", "rm_sprop", "seed_generator",
    ]  # fmt: skip
