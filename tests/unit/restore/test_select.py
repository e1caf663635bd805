"""Parts of a checkpoint by name, by pointer and by slice; places under another name."""

from __future__ import annotations

from typing import Any

import pytest

from midstride.adapters import Report
from midstride.errors import StateMismatch
from midstride.format.values import encode_tree
from midstride.restore.select import Selection, rename_tree
from midstride.tree import ArrayRef, Node, Tree, Value


def _dict(**children: Tree) -> Node:
    return Node("dict", list(children.values()), list(children))


def _tree() -> Node:
    inner = Node("object", [Node("ordereddict", [ArrayRef(0), ArrayRef(1)], ["fc.weight", "a/b"])], None, "x:Y", {})
    return Node(
        "dict", [inner, Node("list", [ArrayRef(2), Value(5), _dict(x=Value(1))]), Value(3)], ["model", "list", 0]
    )


def _prune(only: Any) -> tuple[Any, list[str]]:
    report = Report()
    pruned = Selection.of(only).prune(_tree(), report)
    return encode_tree(pruned), report.problems


def test_names_and_pointers() -> None:
    whole = encode_tree(_tree())
    model = {
        "$": "object",
        "type": "x:Y",
        "items": [{"$": "ordereddict", "named": {"fc.weight": {"$": "array", "i": 0}}}],
    }
    assert _prune(None) == (whole, [])
    assert _prune("list") == (encode_tree(_dict(list=_tree().children[1])), [])
    assert _prune("/model/fc.weight") == ({"$": "dict", "named": {"model": model}}, [])
    assert _prune(["/list/2", "/0"])[0]["pairs"] == [["list", [{"$": "dict", "named": {"x": 1}}]], [0, 3]]
    assert _prune({"/model/a~1b": slice(0, 1)})[0]["named"]["model"]["items"][0]["named"] == {
        "a/b": {"$": "array", "i": 1}
    }
    assert _prune(["model", "/model/fc.weight"]) == _prune("model")


@pytest.mark.parametrize("only", ["missing", "/model/fc", "/model/fc.weight/x", "/list/3", "/list/1/x", "/model/a/b"])
def test_what_is_not_there_is_a_problem(only: str) -> None:
    pruned, problems = _prune([only, "list"])
    assert problems == [f"{only if only.startswith('/') else '/' + only}: is not in the checkpoint"]
    assert "list" in pruned["named"]


def test_the_templates_part() -> None:
    template = {"model": 1, "a/b": 2, 0: 3}
    assert Selection.of(["a/b", "/0"]).pick(template) == {"a/b": 2, 0: 3}
    assert Selection.of(None).pick(template) is template
    for only in ("missing", "/model/x", {"model": slice(1)}):
        with pytest.raises(ValueError, match="top-level"):
            Selection.of(only).pick(template)


def test_slices_are_of_arrays() -> None:
    parts = {"/model/fc.weight": slice(0, 2), "/list/0": (slice(None), slice(0, 9, 3)), "/model/a~1b": None}
    found = Selection.of(parts).array_parts(_tree())
    assert found == {0: (slice(0, 2),), 2: (slice(None), slice(0, 9, 3))}
    with pytest.raises(StateMismatch, match="/list/1"):
        Selection.of({"/list/1": slice(1)}).array_parts(_tree())
    for part in (3, "x", slice(None, None, -1), (slice(1), 2)):
        with pytest.raises(TypeError):
            Selection.of({"/list/0": part})
    with pytest.raises(TypeError, match="names and pointers"):
        Selection.of([3])  # type: ignore[list-item]


def test_renaming() -> None:
    before = encode_tree(tree := _tree())
    renamed = encode_tree(rename_tree(tree, {"model": "net", "/model/a~1b": "/model/c~1d"} | {"/list": "seq"}))
    assert list(dict(renamed["pairs"])) == ["net", "seq", 0]
    assert encode_tree(tree) == before  # the other candidates still have it
    assert encode_tree(rename_tree(_tree(), {"/model/fc.weight": "/model/w"}))["pairs"][0][1]["items"][0][
        "named"
    ].keys() == {
        "w",
        "a/b",
    }
    swapped = encode_tree(rename_tree(_dict(a=Value(1), b=Value(2), c=Value(3)), {"a": "b", "b": "a"}))
    assert swapped["named"] == {"b": 1, "a": 2, "c": 3}
    with pytest.raises(StateMismatch, match="two places /b"):
        rename_tree(_dict(a=Value(1), b=Value(2)), {"a": "b"})
    assert rename_tree(tree, {}) is tree
    for missing in ("x", "/model/x", "/list/0/x", "/x/y"):
        with pytest.raises(StateMismatch, match="not a named place in the checkpoint"):
            rename_tree(_tree(), {missing: missing[:-1] + "z"})
    with pytest.raises(ValueError, match="only the last part"):
        rename_tree(_tree(), {"/model/fc.weight": "/net/fc.weight"})
