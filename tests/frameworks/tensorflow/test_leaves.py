"""``tf.Variable``, ``tf.Tensor`` and ``tf.random.Generator`` in a state of the ``Checkpointer``, in eager mode.

For each way in which an adapter could be wrong there is one that is, and the same check notices it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import midstride as ms
from midstride.dtypes import DTYPES
from midstride.storage import MemoryStorage

tf = pytest.importorskip("tensorflow")

from midstride.tensorflow.adapter import ADAPTER, TensorFlowAdapter  # noqa: E402

RNG = np.random.default_rng(7)
WATCHDOG_SECONDS = 60.0

KNOWN = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "int4", "uint4",
]  # fmt: skip
"""What every supported TensorFlow has."""

NEWER = sorted(name for name in set(DTYPES) - set(KNOWN) if hasattr(ml_dtypes, name))


def of_every_bit(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random bits, so NaNs with payloads, infinities and subnormal numbers are among them."""
    if dtype == "bool":
        return RNG.integers(0, 2, shape).astype(bool)
    kind = np.dtype(dtype)
    if dtype.endswith(("int1", "int2", "int4")):  # of such a byte only the low bits count
        return RNG.integers(0, 2 ** int(dtype[-1]), shape).astype(np.uint8).view(kind)
    count = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer(RNG.bytes(count), kind).reshape(shape)


def zeros(like: Any) -> Any:
    return tf.constant(np.zeros(like.shape, like.dtype.as_numpy_dtype))


def bits(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.asarray(value.numpy() if isinstance(value, tf.Variable | tf.Tensor) else value)
    return array.dtype.name, array.shape, array.tobytes()


def load_file(path: Path) -> dict[str, np.ndarray]:
    """With the library that the format comes from."""
    arrays: dict[str, np.ndarray] = pytest.importorskip("safetensors.numpy").load_file(path)
    return arrays


def through(path: Path | MemoryStorage, saved: Any, live: Any, **options: Any) -> ms.Restored:
    with ms.Checkpointer(path) as ckpt:
        ckpt.save(1, saved).result(WATCHDOG_SECONDS)
        restored = ckpt.restore(live, **options)
    assert restored is not None
    return restored


# Every dtype and shape, through real files.


@pytest.mark.parametrize("dtype", KNOWN + NEWER)
def test_each_dtype_comes_back_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    shapes = {"some": (3, 5), "scalar": (), "empty": (0, 4), "large": (300, 40, 7), "one": (1,)}
    try:
        tf.as_dtype(dtype)
    except TypeError:
        pytest.skip(f"this TensorFlow has no {dtype}")
    tensors = {name: tf.constant(of_every_bit(dtype, shape)) for name, shape in shapes.items()}
    restored = through(tmp_path, {"t": tensors}, {"t": {name: zeros(t) for name, t in tensors.items()}})
    for name, tensor in tensors.items():
        found = restored.state["t"][name]
        assert isinstance(found, tf.Tensor) and found.dtype == tensor.dtype
        assert bits(found) == bits(tensor), name
    arrays = ms.open(tmp_path).load()["t"]
    assert {name: bits(array) for name, array in arrays.items()} == {name: bits(t) for name, t in tensors.items()}
    assert all(type(array) is np.ndarray for array in arrays.values())


@pytest.mark.parametrize("dtype", KNOWN)
def test_variables_of_each_dtype_are_filled_where_they_are(tmp_path: Path, dtype: str) -> None:
    variables = {
        name: tf.Variable(tf.constant(of_every_bit(dtype, shape)))
        for name, shape in {"some": (3, 5), "scalar": (), "empty": (0, 4), "large": (300, 40, 7)}.items()
    }
    wanted = {name: bits(variable) for name, variable in variables.items()}
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"v": variables})
    handles = {name: variable.handle for name, variable in variables.items()}
    for variable in variables.values():
        variable.assign(zeros(variable))
    restored = ms.Checkpointer(tmp_path).restore({"v": variables})
    assert restored is not None
    for name, variable in variables.items():
        assert restored.state["v"][name] is variable and variable.handle is handles[name]
        assert bits(variable) == wanted[name], name


def test_other_tools_read_the_file_by_the_states_names(tmp_path: Path) -> None:
    state = {"layer/kernel": tf.Variable(tf.random.normal([4, 3])), "layer/bias": tf.range(3, dtype=tf.int64)}
    with ms.Checkpointer(tmp_path) as ckpt:
        name = ckpt.save(1, {"model": state}).result(WATCHDOG_SECONDS).name
    arrays = load_file(tmp_path / name / "model.safetensors")
    assert {key: bits(array) for key, array in arrays.items()} == {key: bits(value) for key, value in state.items()}


# A checkpoint is of the moment of save().


class Held(MemoryStorage):
    """Nothing is written before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def create_file(self, name: str, size: int) -> Any:
        assert self.free.wait(WATCHDOG_SECONDS)
        return super().create_file(name, size)


def changed_after_save(late: Callable[[], None] = lambda: None) -> dict[str, bool]:
    """Save, change everything in every way there is, only then let the writer go on: what shows none of it?"""
    start = np.arange(60_000, dtype=np.float32).reshape(300, 200)
    variables = {
        name: tf.Variable(start)
        for name in ("assign", "add", "sub", "scatter", "sparse", "function", "compiled", "gone")
    }
    storage = Held()
    with ms.Checkpointer(storage) as ckpt:
        pending = ckpt.save(1, variables)
        variables["assign"].assign(tf.zeros_like(variables["assign"]))
        variables["add"].assign_add(tf.ones_like(variables["add"]))
        variables["sub"].assign_sub(tf.ones_like(variables["sub"]))
        variables["scatter"].scatter_nd_update([[3]], tf.zeros([1, 200]))
        variables["sparse"].scatter_sub(tf.IndexedSlices(tf.ones([1, 200]), [5]))
        tf.function(lambda: variables["function"].assign(-variables["function"]))()
        tf.function(lambda: variables["compiled"].assign_add(variables["compiled"]), jit_compile=True)()
        del variables["gone"]
        late()
        storage.free.set()
        pending.result(WATCHDOG_SECONDS)
    return {name: bool((array == start).all()) for name, array in ms.open(storage).load().items()}


def test_no_later_change_shows() -> None:
    shown = changed_after_save()
    assert len(shown) == 8 and all(shown.values()), shown


def test_an_adapter_that_copies_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    put_off: list[Callable[[], None]] = []

    def copy(self: TensorFlowAdapter, leaves: list[Any], views: list[Any]) -> None:
        # What an alias of the variable's memory is: its value when the writer comes to it.
        for leaf, view in zip(leaves, views, strict=True):
            put_off.append(lambda leaf=leaf, view=view: np.copyto(view, leaf.source.numpy().reshape(-1).view(np.uint8)))

    monkeypatch.setattr(TensorFlowAdapter, "copy", copy)
    shown = changed_after_save(late=lambda: [late() for late in put_off] and None)
    assert [name for name, kept in shown.items() if kept] == ["gone"]


@pytest.mark.parametrize("staging_bytes", [None, 256 * 1024])
def test_overwritten_all_the_time(tmp_path: Path, staging_bytes: int | None) -> None:
    variables = {f"v{n}": tf.Variable(tf.zeros([37, 1001])) for n in range(8)}
    with ms.Checkpointer(tmp_path, keep=1, staging_bytes=staging_bytes) as ckpt:
        for step in range(1, 9):
            for variable in variables.values():
                variable.assign(tf.fill(variable.shape, float(step)))
            pending = ckpt.save(step, variables)
            for variable in variables.values():
                variable.assign_add(tf.ones_like(variable))
            pending.result(WATCHDOG_SECONDS)
            assert {float(x) for array in ms.open(tmp_path).load(step).values() for x in np.unique(array)} == {step}


def test_a_whole_state_costs_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied into the arena is the variable's own buffer, seen as bytes."""
    variable = tf.Variable(tf.random.normal([1000, 100]))
    copied: list[int] = []
    copyto = np.copyto

    def counting(target: np.ndarray, source: np.ndarray) -> None:
        copied.append(source.ctypes.data)
        copyto(target, source)

    monkeypatch.setattr(np, "copyto", counting)
    with ms.Checkpointer(MemoryStorage()) as ckpt:
        ckpt.save(1, {"v": variable})
    assert copied == [np.asarray(variable.read_value()).ctypes.data]


def test_training_goes_on_in_place_after_a_save() -> None:
    """No reference is kept: else the next update would have to move the variable to other memory."""
    variable = tf.Variable(tf.zeros([1000, 100]))
    address = np.asarray(variable.read_value()).ctypes.data
    with ms.Checkpointer(MemoryStorage()) as ckpt:
        ckpt.save(1, {"v": variable}).result(WATCHDOG_SECONDS)
        variable.assign_add(tf.ones_like(variable))
    assert np.asarray(variable.read_value()).ctypes.data == address


def test_a_gradient_tape_takes_no_notice() -> None:
    variable = tf.Variable([1.0, 2.0])
    with ms.Checkpointer(MemoryStorage()) as ckpt, tf.GradientTape() as tape:
        ckpt.save(1, {"v": variable})
        assert tape.watched_variables() == ()


# One variable in several places, and several that look like one.


def test_a_variable_met_twice_is_stored_once(tmp_path: Path) -> None:
    variable, tensor = tf.Variable(tf.random.normal([100, 100])), tf.random.normal([100, 100])
    wanted = bits(variable)
    state = {"a": {"v": variable, "t": tensor}, "b": [variable, {"deep": tensor}]}
    with ms.Checkpointer(tmp_path) as ckpt:
        name = ckpt.save(1, state).result(WATCHDOG_SECONDS).name
    files = [file.stat().st_size for file in (tmp_path / name).glob("*.safetensors")]
    assert sum(files) < 2 * 40_000 + 2 * 8192
    variable.assign(tf.zeros_like(variable))
    restored = ms.Checkpointer(tmp_path).restore(state)
    assert restored is not None
    assert restored.state["a"]["v"] is restored.state["b"][0] is variable and bits(variable) == wanted
    assert restored.state["a"]["t"] is restored.state["b"][1]["deep"] and restored.state["a"]["t"] is not tensor


def two_from_one_value(storage: MemoryStorage) -> None:
    """Two variables made of one tensor share its buffer until either is updated, and are two all the same."""
    first, second = tf.Variable(tf.zeros([50])), tf.Variable(tf.ones([50]))
    zeros = tf.zeros([50])
    live = [tf.Variable(zeros), tf.Variable(zeros)]
    through(storage, {"a": first, "b": second}, {"a": live[0], "b": live[1]})
    assert (bits(live[0]), bits(live[1])) == (bits(first), bits(second))


def test_variables_that_share_a_buffer_are_not_tied() -> None:
    two_from_one_value(MemoryStorage())


def test_an_adapter_that_ties_by_buffer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory_key(self: Any, value: Any) -> tuple[Any, ...]:
        return (np.asarray(value).__array_interface__["data"][0],)

    monkeypatch.setattr(TensorFlowAdapter, "memory_key", memory_key)
    with pytest.raises(ms.StateMismatch, match="two different arrays"):
        two_from_one_value(MemoryStorage())


def shared_with_a_tensor(storage: MemoryStorage) -> None:
    variable = tf.Variable(tf.zeros([50]))
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, {"v": variable})
    variable.assign(tf.ones([50]))
    looked_at = variable.read_value()
    ms.Checkpointer(storage).restore({"v": variable})
    assert (float(looked_at[0]), float(variable[0])) == (1, 0)


def test_a_value_that_was_read_stays_when_the_variable_is_restored() -> None:
    shared_with_a_tensor(MemoryStorage())


def test_an_adapter_that_writes_into_the_buffer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: Any, value: Any) -> Any:
        destination = ADAPTER.new_array(value.dtype.name, tuple(value.shape))

        def finish() -> Any:
            value.read_value()._numpy()[...] = destination.finish()
            return value

        return type(destination)(destination.buffer, finish)

    monkeypatch.setattr(TensorFlowAdapter, "fill", fill)
    with pytest.raises(AssertionError):
        shared_with_a_tensor(MemoryStorage())


def test_one_variable_for_two_different_arrays_is_an_error() -> None:
    variable = tf.Variable(tf.fill([3], 7.0))
    with pytest.raises(ms.StateMismatch, match=r"/b: shares its memory .*two different arrays"):
        through(
            MemoryStorage(),
            {"a": tf.Variable(tf.zeros([3])), "b": tf.Variable(tf.ones([3]))},
            {"a": variable, "b": variable},
        )
    assert float(variable[0]) == 7


# The way in.


def test_memory_that_was_read_into_is_the_variables_own_afterwards() -> None:
    """Neither another variable nor a later update of this one changes anything but it."""
    value = tf.random.normal([200, 200])
    storage = MemoryStorage()
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, {"v": tf.Variable(value), "t": value})
    variables = [tf.Variable(tf.zeros([200, 200])) for _ in range(2)]
    restored = [ms.Checkpointer(storage).restore({"v": v, "t": tf.zeros([200, 200])}) for v in variables]
    for _ in range(3):
        variables[0].assign_add(tf.ones_like(value))
    assert bits(variables[1]) == bits(value)
    assert all(r is not None and bits(r.state["t"]) == bits(value) for r in restored)
    assert bits(variables[0]) == bits(value + 1.0 + 1.0 + 1.0)


def test_all_that_does_not_fit_is_told_at_once_and_nothing_changes() -> None:
    saved = {"shape": tf.zeros([3]), "dtype": tf.zeros([3]), "kind": 1, "gone": tf.zeros([1]), "good": tf.ones([2])}
    live = {
        "shape": tf.Variable(tf.ones([4])), "dtype": tf.Variable([1, 2, 3], dtype=tf.int32), "kind": tf.Variable(3.0),
        "new": tf.Variable(5.0), "good": tf.Variable([7.0, 7.0]),
    }  # fmt: skip
    before = {name: bits(variable) for name, variable in live.items()}
    with pytest.raises(ms.StateMismatch) as caught:
        through(MemoryStorage(), saved, live)
    for part in (
        "/shape: the checkpoint has shape [3], the state wants [4]",
        "/dtype: the checkpoint has dtype float32, the state wants int32",
        "/kind: the checkpoint holds a int, the state wants an array float32[]",
        "/new: is not in the checkpoint",
        "/gone: is in the checkpoint, not in the state",
    ):
        assert part in str(caught.value)
    assert {name: bits(variable) for name, variable in live.items()} == before


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_a_cast_is_said_and_rounds_as_numpy_does(dtype: str) -> None:
    values = RNG.standard_normal((7, 5)).astype(np.float32)
    wanted = values.astype(np.dtype(dtype))
    storage = MemoryStorage()
    variable, tensor = tf.Variable(tf.zeros([7, 5], dtype)), tf.zeros([7, 5], dtype)
    state = {"v": variable, "t": tensor}
    with pytest.raises(ms.StateMismatch, match="cast=True converts it"):
        through(storage, {"v": tf.constant(values), "t": tf.Variable(values)}, state)
    restored = ms.Checkpointer(storage).restore(state, cast=True)
    assert restored is not None and restored.state["v"] is variable
    assert bits(variable) == bits(restored.state["t"]) == bits(wanted)


def test_integers_that_do_not_fit_are_not_cast() -> None:
    variable = tf.Variable([0, 0], dtype=tf.int8)
    with pytest.raises(ms.StateMismatch, match="do not fit int8"):
        through(MemoryStorage(), {"v": tf.constant([1, 300], tf.int32)}, {"v": variable}, cast=True)
    assert variable.numpy().tolist() == [0, 0]


def test_between_frameworks() -> None:
    torch = pytest.importorskip("torch")
    values = RNG.standard_normal((4, 3)).astype(np.float32)
    variable = tf.Variable(tf.zeros([4, 3]))
    storage = MemoryStorage()
    through(storage, {"w": torch.from_numpy(values)}, {"w": variable})
    assert bits(variable) == bits(values)
    restored = through(MemoryStorage(), {"w": variable, "b": tf.constant([True])}, {"w": torch.zeros(4, 3), "b": None})
    assert torch.equal(restored.state["w"], torch.from_numpy(values)) and type(restored.state["b"]) is np.ndarray


def test_a_dtype_that_tensorflow_lacks_is_named() -> None:
    lacking = getattr(ml_dtypes, "float8_e8m0fnu", None)
    if lacking is None:
        pytest.skip("nor has ml_dtypes it")
    array = np.zeros(3, lacking)
    with pytest.raises(ms.StateMismatch, match="TensorFlow has no dtype float8_e8m0fnu|has dtype float8_e8m0fnu"):
        through(MemoryStorage(), {"a": array}, {"a": tf.zeros([3])}, cast=True)


def test_a_damaged_block_leaves_variables_as_they_were(tmp_path: Path) -> None:
    variable = tf.Variable(tf.zeros([100]))
    ckpt = ms.Checkpointer(tmp_path)
    name = ckpt.save(1, {"v": variable}).result(WATCHDOG_SECONDS).name
    path = tmp_path / name / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    variable.assign(tf.ones([100]))
    with pytest.raises(ms.NothingRestorable):
        ckpt.restore({"v": variable})
    assert float(variable[99]) == 1
    ckpt.save(2, {"v": variable}).result(WATCHDOG_SECONDS)  # they are whole, so they may be saved
    ckpt.close()


def test_an_assignment_that_fails_half_way_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tf.Variable(tf.zeros([3])), tf.Variable(tf.zeros([3]))
    with ms.Checkpointer(MemoryStorage()) as ckpt:
        ckpt.save(1, {"a": first, "b": second})

        def refuse(*arguments: Any, **options: Any) -> None:
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

        monkeypatch.setattr(second, "assign", refuse)
        with pytest.raises(ms.StateMismatch, match="partly overwritten"):
            ckpt.restore({"a": first, "b": second})
        with pytest.raises(ms.StagingError, match="not whole"):
            ckpt.save(2, {"a": first, "b": second})


def test_a_part_is_restored_alone() -> None:
    state = {"a": tf.Variable([1.0]), "b": tf.Variable([2.0])}
    storage = MemoryStorage()
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, state)
    state["a"].assign([5.0])
    state["b"].assign([5.0])
    restored = ms.Checkpointer(storage).restore(state, only="a")
    assert restored is not None and restored.state["b"] is state["b"]
    assert (float(state["a"][0]), float(state["b"][0])) == (1, 5)


# What cannot be saved is refused by its path, and nothing is written.


def refused(value: Any, match: str) -> None:
    storage = MemoryStorage()
    ckpt = ms.Checkpointer(storage)
    with pytest.raises(ms.UnsupportedState, match=rf"^/deep/0/it: .*{match}.*Nothing was written"):
        ckpt.save(1, {"deep": [{"it": value}]})
    ckpt.close()
    assert ms.Checkpointer(storage).restore() is None


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: tf.constant(["a", "b"]), "strings"),
        (lambda: tf.Variable("text"), "strings"),
        (lambda: tf.ragged.constant([[1], [2, 3]]), "RaggedTensor is made of several"),
        (lambda: tf.sparse.from_dense([[0, 1]]), "SparseTensor is made of several"),
        (lambda: tf.IndexedSlices(tf.ones([1, 2]), [0]), "IndexedSlices is made of several"),
        (lambda: tf.TensorArray(tf.float32, 2), "TensorArray is made of several"),
        (lambda: tf.Variable(1.0).handle, "a handle to something else"),
        (lambda: tf.data.experimental.to_variant(tf.data.Dataset.range(3)), "a handle to something else"),
        (lambda: tf.quantization.quantize([1.0], 0.0, 2.0, tf.quint8)[0], "dtype quint8 cannot"),
        (lambda: tf.Variable([1.0], shape=tf.TensorShape([None])), "another shape at each save"),
        (lambda: tf.Variable(1.0, shape=tf.TensorShape(None)), "another shape at each save"),
        (lambda: tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0), "cannot be saved"),
        (lambda: iter(tf.data.Dataset.range(3)), "cannot be saved"),
    ],
)
def test_refusals(make: Callable[[], Any], match: str) -> None:
    refused(make(), match)


def in_a_graph() -> Iterator[Any]:
    with tf.Graph().as_default():
        yield tf.constant(1.0)
        yield tf.Variable(1.0)
        yield tf.compat.v1.get_variable("resource", [3], use_resource=True)
        yield tf.compat.v1.get_variable("ref", [3], use_resource=False)


def test_parts_of_a_graph_are_refused_inside_and_outside_of_it() -> None:
    with tf.Graph().as_default():
        refused(tf.constant(1.0), "AsyncCheckpointSaverHook")
        refused(tf.compat.v1.get_variable("v", [3], use_resource=False), "AsyncCheckpointSaverHook")
    for value in in_a_graph():
        refused(value, "AsyncCheckpointSaverHook")
    for value in list(in_a_graph()):
        refused(value, "AsyncCheckpointSaverHook")


def test_an_eager_variable_inside_of_a_graph_is_refused() -> None:
    variable = tf.Variable(1.0)
    with tf.Graph().as_default():
        refused(variable, "AsyncCheckpointSaverHook")

    @tf.function
    def step() -> None:
        refused(variable, "save outside of it")

    step()


def test_a_restore_into_a_graph_is_refused() -> None:
    storage = MemoryStorage()
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, {"v": tf.constant(1.0)})
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", [])
        with pytest.raises(ms.StateMismatch, match="/v: .*AsyncCheckpointSaverHook"):
            ms.Checkpointer(storage).restore({"v": variable})


def test_a_variable_without_a_value_is_refused() -> None:
    from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

    variable = UninitializedVariable(shape=[2], dtype=tf.float32, name="later")
    refused(variable, "later.* has no value yet")
    through(MemoryStorage(), {"v": tf.constant([1.0, 2.0])}, {"v": variable})  # to be given one is what it waits for
    assert variable.numpy().tolist() == [1, 2]


# Random numbers, and several devices.


def test_a_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    generator = tf.random.Generator.from_seed(3)
    generator.normal([5])
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"rng": generator})
    wanted = [generator.normal([3]).numpy().tolist() for _ in range(3)]
    fresh = tf.random.Generator.from_seed(99)
    state = fresh.state
    ms.Checkpointer(tmp_path).restore({"rng": fresh})
    assert fresh.state is state
    assert [fresh.normal([3]).numpy().tolist() for _ in range(3)] == wanted


def test_a_generator_of_another_algorithm_is_an_error() -> None:
    with pytest.raises(ms.StateMismatch, match="the generator's algorithm is"):
        through(
            MemoryStorage(),
            {"rng": tf.random.Generator.from_seed(3, alg="philox")},
            {"rng": tf.random.Generator.from_seed(3, alg="threefry")},
        )
