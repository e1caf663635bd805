"""Plan, arena, stager, digests: every byte where the plan says, whatever the budget, memory reused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open

import midstride as ms
from midstride.format.manifest import slice_digest
from midstride.limits import BLOCK_BYTES, PAGE_BYTES
from midstride.save import plan as planning
from midstride.save.arena import Arena, chunk_bytes
from midstride.save.capture import capture
from midstride.save.digest import Digester
from midstride.save.plan import Plan, Planner
from midstride.save.stage import Stager

CHUNK = 64 * 1024


def odd_state() -> dict[str, Any]:
    """Arrays of all sizes and layouts, two libraries, several files."""
    rng = np.random.default_rng(0)
    base = torch.from_numpy(rng.standard_normal((70, 90)))
    return {
        "a": {"w": rng.standard_normal((300, 211)).astype(np.float32), "n": np.int8([1, 2, 3]), "e": np.empty((0, 4))},
        "b": {
            "t": base.T,
            "step": base[::3, 1::2],
            "c": torch.view_as_complex(torch.from_numpy(rng.standard_normal((5, 2)))).conj(),
            "half": torch.randn(1001).to(torch.bfloat16),
        },
        "deep": [{"f": np.asfortranarray(rng.standard_normal((64, 33)))}, [rng.integers(0, 9, 5).astype(">i4")]],
        "flat": np.arange(CHUNK + 11, dtype=np.uint8),
        "scalar": torch.tensor(3.5),
    }


def expected_bytes(leaf: Any) -> bytes:
    source = leaf.source
    if isinstance(source, torch.Tensor):
        return source.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(source).astype(source.dtype.newbyteorder("<")).tobytes()


def assemble(plan: Plan, arena: Arena, leaves: Any, *, through: bool) -> list[bytearray]:
    """The files' bytes, put together from the chunks as a writer would get them."""
    files = [bytearray(file.size) for file in plan.files]
    places: list[int] = list(range(0, arena.nbytes - CHUNK + 1, CHUNK)) if through else []
    order = []

    def deliver(number: int, place: int) -> None:
        chunk = plan.chunks[number]
        assert place % PAGE_BYTES == 0
        files[chunk.file][chunk.offset : chunk.offset + chunk.nbytes] = arena.bytes[
            place : place + chunk.nbytes
        ].tobytes()
        order.append(number)
        if through:
            arena.bytes[place : place + chunk.nbytes] = 0xEE  # a place that was given back may hold anything
            places.append(place)

    stager = Stager(arena)
    if through:
        stager.stage_through(plan, leaves, lambda: places.pop(0), deliver)
    else:
        stager.stage_whole(plan, leaves, deliver)
    assert order == list(range(len(plan.chunks)))
    return files


@pytest.mark.parametrize("through", [False, True])
def test_every_byte_lies_where_the_plan_says(through: bool) -> None:
    leaves = capture(odd_state()).leaves
    plan = Planner().plan(leaves, CHUNK)
    arena = Arena(CHUNK * 2 if through else plan.arena_bytes)
    files = assemble(plan, arena, leaves, through=through)
    for file, content in zip(plan.files, files, strict=True):
        assert content[: len(file.head)] == file.head
        position = len(file.head)
        for slot in file.slots:
            assert slot.begin == position
            assert content[slot.begin : slot.end] == expected_bytes(leaves[slot.leaf])
            position = slot.end
        assert position == file.size
    assert sorted(slot.leaf for file in plan.files for slot in file.slots) == list(range(len(leaves)))


def test_digests_are_of_the_bytes_however_they_are_cut() -> None:
    big = np.arange(BLOCK_BYTES // 4 * 2 + 5, dtype=np.float32)
    leaves = capture({"x": {"big": big, "small": np.ones(3, np.int16), "none": np.empty(0)}}).leaves
    plan = Planner().plan(leaves, CHUNK * 7)
    arena = Arena(plan.arena_bytes)
    digester = Digester(plan.files)
    Stager(arena).stage_whole(
        plan,
        leaves,
        lambda n, place: digester.update(plan.chunks[n], arena.bytes[place : place + plan.chunks[n].nbytes]),
    )
    raw = big.tobytes()
    blocks = tuple(xxhash.xxh3_128_hexdigest(raw[at : at + BLOCK_BYTES]) for at in range(0, len(raw), BLOCK_BYTES))
    found = {leaves[slot.leaf].path[-1]: digester.of_slot(0, n) for n, slot in enumerate(plan.files[0].slots)}
    assert found["big"] == (slice_digest(blocks), blocks)
    assert found["small"] == (xxhash.xxh3_128_hexdigest(np.ones(3, np.int16).tobytes()), ())
    assert found["none"] == (xxhash.xxh3_128_hexdigest(b""), ())


def test_a_plan_is_kept_while_the_structure_stays() -> None:
    planner = Planner()
    first = planner.plan(capture({"a": {"x": np.zeros(3)}}).leaves, CHUNK)
    assert planner.plan(capture({"a": {"x": np.ones(3)}}).leaves, CHUNK) is first
    for changed in (
        {"a": {"x": np.zeros(4)}},
        {"a": {"x": np.zeros(3, "f4")}},
        {"a": {"y": np.zeros(3)}},
        {"b": {"x": np.zeros(3)}},
    ):
        assert planner.plan(capture(changed).leaves, CHUNK) is not first
    one, true = ({"a": {key: {"x": np.zeros(3)}}} for key in (1, True))
    first = planner.plan(capture(one).leaves, CHUNK)
    assert planner.plan(capture(true).leaves, CHUNK) is not first


def test_files_follow_the_items_of_the_state() -> None:
    plan = Planner().plan(capture(odd_state()).leaves, CHUNK)
    assert [file.name for file in plan.files] == [
        "a.safetensors",
        "b.safetensors",
        "deep.safetensors",
        "state.safetensors",
    ]
    keys = {file.name: sorted(slot.key for slot in file.slots) for file in plan.files}
    assert keys["b.safetensors"] == ["c", "half", "step", "t"]
    assert keys["deep.safetensors"] == ["/0/f", "/1/0"]
    many = {f"item{n}": {"x": np.zeros(1)} for n in range(planning.limits.MAX_ITEM_FILES + 1)}
    assert [file.name for file in Planner().plan(capture(many).leaves, CHUNK).files] == ["state.safetensors"]
    single = Planner().plan(capture(np.zeros(3)).leaves, CHUNK)
    assert [file.name for file in single.files] == ["state.safetensors"]


def test_large_items_are_split_as_hugging_face_splits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planning.limits, "SPLIT_BYTES", 1000)
    state = {"model": {f"w{n}": np.full(100, n, np.float32) for n in range(5)}}
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        folder = tmp_path / "run" / ckpt.save(1, state).result().name
    names = sorted(path.name for path in folder.glob("model*"))
    shards = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert names == [*shards, "model.safetensors.index.json"]
    with safe_open(folder / shards[2], framework="numpy") as file:
        assert list(file.keys()) == ["w4"]
        assert (file.get_tensor("w4") == 4).all()
    assert (ms.open(tmp_path / "run").load()["model"]["w3"] == 3).all()


@pytest.mark.parametrize("staging_bytes", [256 * 1024, 1_000_000, None])
def test_any_budget_gives_the_same_checkpoint(staging_bytes: int | None, tmp_path: Path) -> None:
    state = {**odd_state(), "more": {"x": np.arange(2_000_000, dtype=np.float32)}}
    with ms.Checkpointer(tmp_path / "run", staging_bytes=staging_bytes) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state).result()
            held = ckpt.statistics().staging_bytes
            assert staging_bytes is None or held <= staging_bytes
    read = ms.open(tmp_path / "run").load()
    np.testing.assert_array_equal(read["more"]["x"], state["more"]["x"])
    np.testing.assert_array_equal(read["b"]["t"], state["b"]["t"].numpy())
    np.testing.assert_array_equal(read["b"]["c"], state["b"]["c"].resolve_conj().numpy())
    assert all(problems == [] for problems in ms.open(tmp_path / "run").verify().values())


def test_the_arena_is_made_once_and_given_back(tmp_path: Path) -> None:
    state = {"x": {"w": np.ones(500_000)}}
    ckpt = ms.Checkpointer(tmp_path / "run")
    ckpt.save(1, state).result()
    arena = ckpt._saver._arena
    assert arena is not None
    address = arena.bytes.ctypes.data
    for step in (2, 3):
        ckpt.save(step, {"x": {"w": np.full(500_000, step)}}).result()
        assert ckpt._saver._arena is arena
        assert arena.bytes.ctypes.data == address
    ckpt.save(4, {"x": {"w": np.ones(900_000)}}).result()  # it grows with the state
    assert ckpt._saver._arena is not arena
    assert ckpt.statistics().staging_bytes >= 900_000 * 8
    ckpt.close()
    assert ckpt.statistics().staging_bytes == 0


def test_prefault_makes_every_page_present() -> None:
    arena = Arena(32 * 2**20)
    arena.prefault()
    assert arena._prefault is not None
    arena._prefault.join()
    resident = sum(
        int(line.split()[1]) for line in Path("/proc/self/smaps").read_text().split("midstride-arena")[1].splitlines()[1:]
        if line.startswith("Rss:")
    )  # fmt: skip
    assert resident >= arena.nbytes // 1024
    arena.close()


def test_a_forked_child_does_not_have_the_arena() -> None:
    arena = Arena(2**20)
    arena.bytes[:] = 7
    child = os.fork()
    if child == 0:
        maps = Path("/proc/self/maps").read_text()
        os._exit(1 if "midstride-arena" in maps else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert (arena.bytes == 7).all()
    arena.close()


def test_pieces_fit_the_budget() -> None:
    for budget in (256 * 1024, 10**6, 10**8, 10**11):
        piece = chunk_bytes(budget)
        assert piece % PAGE_BYTES == 0
        assert piece * 4 <= max(budget, piece * 4)
        assert budget // piece >= 4
