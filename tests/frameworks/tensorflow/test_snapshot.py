"""Snapshots of what a Saver saves: of one moment, written without the session, byte for byte what the plain Saver writes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from midstride.errors import SaveError  # noqa: E402
from midstride.tensorflow.snapshot import Snapshot, Snapshotter  # noqa: E402
from midstride.tensorflow.state_file import announce  # noqa: E402

v1 = tf.compat.v1

DTYPES = [tf.bfloat16, tf.float16, tf.float64, tf.int8, tf.uint8, tf.int64, tf.bool, tf.complex64, tf.string]
VARIABLES = [pytest.param(True, id="resource"), pytest.param(False, id="ref")]


@dataclass
class Model:
    """A finalised graph and its saver. ``change`` alters all that is saved."""

    graph: Any = field(default_factory=tf.Graph)
    step: Any = None
    saver: Any = None
    init: Any = None
    change: Any = None
    probes: list[Any] = field(default_factory=list)
    """These tensors tell all that is saved; running them may move an iterator on."""

    def session(self, target: str = "", *, init: bool = True) -> Any:
        session = v1.Session(target, graph=self.graph, config=v1.ConfigProto(device_count={"CPU": 2}))
        if init:
            session.run(self.init)
        return session

    def snapshotter(self, mode: str = "auto") -> Snapshotter:
        return Snapshotter(self.graph, self.saver, mode, step=self.step)

    def probe(self, session: Any) -> list[Any]:
        return session.run(self.probes)


@contextlib.contextmanager
def building(*, resource: bool = True, **saver_options: Any) -> Iterator[Model]:
    model = Model(init=tf.no_op)
    with model.graph.as_default(), v1.variable_scope("", use_resource=resource):
        model.step = v1.train.get_or_create_global_step()
        yield model
        # After it, since a change may depend on the step.
        with tf.control_dependencies([model.change]):
            model.change = tf.group(v1.assign_add(model.step, 1))
        model.init = tf.group(v1.global_variables_initializer(), model.init())
        model.probes.append(tf.identity(model.step))
        if model.saver is None:
            model.saver = v1.train.Saver(**saver_options)
    model.graph.finalize()


def variables(*, resource: bool = True, partitioned: bool = False, **saver_options: Any) -> Model:
    """Two variables on two devices. All their elements are equal to the step."""
    partitioner = v1.fixed_size_partitioner(3) if partitioned else None
    with building(resource=resource, **saver_options) as model:
        changes = []
        for number in range(2):
            with tf.device(f"/cpu:{number}"):
                v = v1.get_variable(f"v{number}", [7, 3], initializer=v1.zeros_initializer(), partitioner=partitioner)
                changes += [v1.assign_add(part, tf.ones_like(part)) for part in (v if partitioned else [v])]
            model.probes.append(tf.identity(tf.convert_to_tensor(v)))
        model.change = tf.group(*changes)
    return model


def of_dtype(dtype: Any, *, resource: bool = True) -> Model:
    if dtype == tf.string:
        one, other = np.array([b"", b"a\0b"], object), np.array([b"longer than it was" * 9, b"\xff"], object)
    else:
        one = np.array([0, 1]).astype(dtype.as_numpy_dtype)
        other = one[::-1].copy()
    with building(resource=resource) as model:
        v = v1.get_variable("v", initializer=tf.constant(one, dtype))
        scalar = v1.get_variable("scalar", initializer=tf.constant(one[1], dtype))
        empty = v1.get_variable("empty", initializer=tf.constant(one[:0], dtype))
        model.change = tf.group(v1.assign(v, tf.constant(other, dtype)), v1.assign(scalar, tf.constant(one[0], dtype)))
        model.probes += [tf.identity(v), tf.identity(scalar), tf.identity(empty)]
    return model


def table(*, dense: bool) -> Model:
    """Each change adds a key, and changes the value of an old one where it stands."""
    with building() as model:
        if dense:
            made = tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, -1.0, empty_key=-1, deleted_key=-2)
        else:
            made = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, -1.0)
        count = tf.identity(model.step)
        values = tf.cast(tf.stack([count, count]), tf.float32)
        with tf.control_dependencies([values]):
            model.change = made.insert(tf.stack([tf.constant(3, tf.int64), count]), values)
        model.probes.append(made.lookup(tf.range(6, dtype=tf.int64)))
    return model


def still(dataset: Any) -> Any:
    """Without the prefetching that TensorFlow adds by itself: it changes the iterator's state between two looks."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def iterator(*, resource: bool = True, **saver_options: Any) -> Model:
    with building(resource=resource, **saver_options) as model:
        made = v1.data.make_initializable_iterator(still(tf.data.Dataset.range(100).shuffle(10, seed=1)))
        v1.add_to_collection(v1.GraphKeys.SAVEABLE_OBJECTS, v1.data.experimental.make_saveable_from_iterator(made))
        v = v1.get_variable("v", [7, 3], initializer=v1.zeros_initializer())
        following = made.get_next()
        model.init = lambda: made.initializer
        model.change = tf.group(following, v1.assign_add(v, tf.ones_like(v)))
        model.probes += [following, tf.identity(v)]
    return model


ROWS: dict[str, Callable[[], Model]] = {
    f"{kind}-{'resource' if resource else 'ref'}": lambda resource=resource, options=options: variables(
        resource=resource, **options
    )
    for resource in (True, False)
    for kind, options in {
        "v2": {},
        "v1": {"write_version": v1.train.SaverDef.V1},
        "v2-sharded": {"sharded": True},
        "v1-sharded": {"sharded": True, "write_version": v1.train.SaverDef.V1},
        "v2-partitioned": {"partitioned": True},
        "v1-partitioned": {"partitioned": True, "write_version": v1.train.SaverDef.V1},
        "v2-partitioned-sharded": {"partitioned": True, "sharded": True},
        "padded": {"pad_step_number": True, "save_relative_paths": True},
    }.items()
}
ROWS |= {
    f"{dtype.name}-{'resource' if resource else 'ref'}": lambda dtype=dtype, resource=resource: of_dtype(
        dtype, resource=resource
    )
    for dtype in DTYPES
    for resource in (True, False)
}
ROWS |= {
    "mutable-table": lambda: table(dense=False),
    "dense-table": lambda: table(dense=True),
    "iterator-resource": iterator,
    "iterator-ref": lambda: iterator(resource=False),
    "iterator-sharded": lambda: iterator(sharded=True),
}


def in_thread(task: Callable[[], Any]) -> Any:
    """On a thread that knows no graph, as the hook's worker is."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(task).result(60)


def write(snapshot: Snapshot, folder: Path, **options: Any) -> Any:
    def work() -> Any:
        path = snapshot.write(str(folder / "model.ckpt"), snapshot.step, **options)
        if path is not None:
            announce(snapshot._owner.saver, path, basename="model.ckpt")
        return path

    return in_thread(work)


def files(folder: Path) -> dict[str, bytes]:
    """The names and the contents. The state file holds paths, so the folder is taken out of it."""
    return {
        file.name: file.read_bytes().replace(str(folder).encode(), b"FOLDER")
        for file in sorted(folder.iterdir())
        if file.is_file()
    }


def save_plainly(model: Model, session: Any, folder: Path, step: int) -> str:
    """As the plain hook would; the saver forgets it afterwards."""
    known = list(model.saver._last_checkpoints)
    folder.mkdir(exist_ok=True)
    with model.graph.as_default():
        path = model.saver.save(session, str(folder / "model.ckpt"), global_step=step)
    model.saver.set_last_checkpoints_with_time(known)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "ours"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def server() -> Any:
    return v1.train.Server.create_local_server()


OTHER_MODES = [
    "v2-resource",
    "v1-sharded-ref",
    "bfloat16-resource",
    "string-resource",
    "dense-table",
    "iterator-sharded",
]


@pytest.mark.parametrize(
    "row, mode", [(row, "auto") for row in ROWS] + [(row, mode) for row in OTHER_MODES for mode in ("copy", "blocking")]
)
def test_it_writes_what_the_plain_saver_would_have_written(row: str, mode: str, tmp_path: Path, folder: Path) -> None:
    model = ROWS[row]()
    session = model.session()
    for _ in range(2):
        session.run(model.change)
    plain = save_plainly(model, session, tmp_path / "plain", 2)
    snapshotter = model.snapshotter(mode)
    snapshot = snapshotter.take(session)
    assert snapshot.step == 2
    assert snapshot.blocking == (mode == "blocking")
    if not snapshot.blocking:
        for _ in range(3):
            session.run(model.change)
        session.close()
    path = write(snapshot, folder)
    assert path == plain.replace(str(tmp_path / "plain"), str(folder))
    assert files(folder) == files(tmp_path / "plain")

    # Byte equality says it all, unless the oracle is wrong too.
    other = ROWS[row]()
    with other.session() as restored, other.session() as changed:
        other.saver.restore(restored, path)
        for _ in range(2):
            changed.run(other.change)
        for ours, expected in zip(other.probe(restored), other.probe(changed), strict=True):
            np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("mode", ["auto", "copy"])
@pytest.mark.parametrize(
    "row", ["v2-resource", "v2-ref", "v1-partitioned-ref", "string-ref", "bfloat16-ref", "dense-table"]
)
def test_a_grpc_session_is_fetched(row: str, mode: str, server: Any, tmp_path: Path, folder: Path) -> None:
    v1.Session.reset(server.target)
    model = ROWS[row]()
    # The server has one device, whatever the session asks for.
    session = v1.Session(server.target, graph=model.graph, config=v1.ConfigProto(allow_soft_placement=True))
    session.run(model.init)
    session.run(model.change)
    save_plainly(model, session, tmp_path / "plain", 1)
    snapshotter = model.snapshotter(mode)
    snapshot = snapshotter.take(session)
    assert (snapshotter.mode, snapshot.blocking, snapshot.held_bytes) == ("copy", False, 0)
    session.run(model.change)
    session.close()
    write(snapshot, folder)
    assert files(folder) == files(tmp_path / "plain")


def test_a_wrapped_session_is_fetched(tmp_path: Path, folder: Path) -> None:
    class Wrapped:
        def __init__(self, session: Any) -> None:
            self.run = session.run

    model = variables()
    with model.session() as session:
        save_plainly(model, session, tmp_path / "plain", 0)
        snapshotter = model.snapshotter()
        snapshot = snapshotter.take(Wrapped(session))
        assert snapshotter.reason == "3 tensors are fetched from a remote or wrapped session"
        session.run(model.change)
        write(snapshot, folder)
        assert files(folder) == files(tmp_path / "plain")
        with pytest.raises(ValueError, match="remote or wrapped"):
            model.snapshotter("handles").take(Wrapped(session))


def test_variants_of_a_grpc_session_are_saved_blocking(server: Any, tmp_path: Path, folder: Path) -> None:
    v1.Session.reset(server.target)
    model = iterator()
    with model.session(server.target) as session:
        save_plainly(model, session, tmp_path / "plain", 0)
        snapshotter = model.snapshotter()
        assert snapshotter.mode == "handles"
        snapshot = snapshotter.take(session)
        assert snapshot.blocking
        assert snapshotter.mode == "blocking"
        assert "SerializeIterator:0 is a variant" in snapshotter.reason
        write(snapshot, folder)
        assert files(folder) == files(tmp_path / "plain")
        with pytest.raises(ValueError, match="SerializeIterator:0 is a variant"):
            model.snapshotter("handles").take(session)


def test_a_variant_is_restored_at_its_place(folder: Path) -> None:
    model = iterator()
    with model.session() as session:
        session.run(model.change)
        snapshot = model.snapshotter().take(session)
        scratch = Path(snapshot._scratch.name)
        following = [model.probe(session)[0] for _ in range(3)]
        write(snapshot, folder)
        assert scratch.exists()
        snapshot.drop()
        assert not scratch.exists()
        model.saver.restore(session, str(folder / "model.ckpt-1"))
        assert [model.probe(session)[0] for _ in range(3)] == following


def test_buffers_of_resource_variables_are_held_and_outlive_their_session(folder: Path) -> None:
    model = variables()
    session = model.session()
    snapshotter = model.snapshotter()
    assert snapshotter.reason == "the buffers of 3 tensors are held"
    snapshot = snapshotter.take(session)
    assert (snapshot.held_bytes, snapshot.copied_bytes) == (2 * 7 * 3 * 4, 8)
    session.run(model.change)
    session.close()
    snapshotter.forget_session()
    del session
    gc.collect()
    write(snapshot, folder)
    assert tf.train.load_variable(str(folder), "v1").max() == 0


def test_what_is_live_memory_is_copied() -> None:
    model = variables(resource=False)
    snapshotter = model.snapshotter()
    assert (snapshotter.mode, snapshotter.reason) == ("copy", "3 tensors are copied before training goes on")
    with model.session() as session:
        snapshot = snapshotter.take(session)
    assert (snapshot.held_bytes, snapshot.copied_bytes) == (0, 2 * 7 * 3 * 4 + 8)
    with pytest.raises(ValueError, match=r"nothing can be held \(.* comes from a VariableV2"):
        model.snapshotter("handles")


def test_one_live_tensor_does_not_keep_the_others_from_being_held() -> None:
    with building() as model:
        held = v1.get_variable("held", [4], initializer=v1.zeros_initializer())
        live = v1.get_variable("live", [2], initializer=v1.zeros_initializer(), use_resource=False)
        passed = tf.identity(held)
        model.change = tf.group(v1.assign_add(held, tf.ones([4])), v1.assign_add(live, tf.ones([2])))
    snapshotter = model.snapshotter("handles")
    assert snapshotter.mode == "handles"
    assert "(live:0 comes from a VariableV2)" in snapshotter.reason
    with model.session() as session:
        snapshot = snapshotter.take(session)
    assert (snapshot.held_bytes, snapshot.copied_bytes) == (4 * 4, 2 * 4 + 8)
    assert passed.op.type == "Identity"


@pytest.mark.parametrize("way", ["dense", "sparse", "slice", "compiled", "optimizer"])
def test_no_update_writes_into_a_held_buffer(way: str, folder: Path) -> None:
    with building() as model:
        v = v1.get_variable("v", [64, 4], initializer=v1.zeros_initializer())
        model.init = tf.no_op
        if way == "dense":
            model.change = v.assign_add(tf.ones([64, 4])).op
        elif way == "sparse":
            model.change = tf.group(v1.scatter_add(v, [1, 2], tf.ones([2, 4])))
        elif way == "slice":
            model.change = tf.group(v[3:5].assign(tf.cast(model.step + 1, tf.float32) * tf.ones([2, 4])))
        elif way == "compiled":

            @tf.function(jit_compile=True)
            def add() -> Any:
                v.assign_add(tf.ones([64, 4]))
                return v.read_value()

            model.change = tf.group(add())
        else:
            model.change = v1.train.AdamOptimizer().minimize(tf.reduce_sum(v * 3.0))
    with model.session() as session:
        snapshotter = model.snapshotter()
        for step in range(3):
            now = session.run(v)
            snapshot = snapshotter.take(session)
            assert snapshot.held_bytes >= now.nbytes
            session.run(model.change)
            assert (session.run(v) != now).any()
            write(snapshot, folder)
            np.testing.assert_array_equal(tf.train.load_variable(str(folder), "v"), now)
            snapshot.drop()


def test_settled_it_holds_nothing_and_writes_the_same(tmp_path: Path, folder: Path) -> None:
    model = variables()
    with model.session() as session:
        save_plainly(model, session, tmp_path / "plain", 0)
        snapshotter = model.snapshotter()
        snapshot = snapshotter.take(session)
        in_thread(snapshot.settle)
        buffers = {value.ctypes.data for value in snapshot._values if value.size > 1}
        session.run(model.change)
        write(snapshot, folder)
        assert files(folder) == files(tmp_path / "plain")
        snapshot.drop()
        again = snapshotter.take(session)
        in_thread(again.settle)
        assert {value.ctypes.data for value in again._values if value.size > 1} == buffers
        assert all(address % 64 == 0 for address in buffers)


def test_two_snapshots_at_once_do_not_share_memory(folder: Path) -> None:
    model = variables(resource=False)
    with model.session() as session:
        snapshotter = model.snapshotter()
        taken = []
        for _ in range(3):
            taken.append(snapshotter.take(session))
            session.run(model.change)
    for step, snapshot in enumerate(taken):
        write(snapshot, folder)
        assert np.unique(tf.train.load_variable(str(folder), "v0")) == [step]
        snapshot.drop()


def test_the_next_session_of_the_graph_needs_no_other_snapshotter(folder: Path) -> None:
    model = variables()
    snapshotter = model.snapshotter()
    first = model.session()
    first.run(model.change)
    snapshot = snapshotter.take(first)
    first.close()
    with model.session() as second:
        other = snapshotter.take(second)
        write(snapshot, folder)
        write(other, folder)
    assert sorted(name for name in files(folder) if name.endswith("index")) == [
        "model.ckpt-0.index",
        "model.ckpt-1.index",
    ]


def test_the_graph_is_left_as_it_was(folder: Path) -> None:
    model = iterator()
    before = model.graph.as_graph_def().SerializeToString(deterministic=True)
    with model.session() as session:
        write(model.snapshotter().take(session), folder)
    assert model.graph.finalized
    assert model.graph.as_graph_def().SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    "options", [{"max_to_keep": 2}, {"max_to_keep": 1, "keep_checkpoint_every_n_hours": 1e-9}, {"max_to_keep": None}]
)
def test_the_saver_deletes_as_ever(options: dict[str, Any], tmp_path: Path, folder: Path) -> None:
    def run(save: Callable[[Model, Any, int], Any]) -> list[str]:
        model = variables(**options)
        with model.session() as session:
            for step in range(5):
                save(model, session, step)
                session.run(model.change)
        return [Path(path).name for path in model.saver.last_checkpoints]

    def plain(model: Model, session: Any, step: int) -> None:
        with model.graph.as_default():
            model.saver.save(session, str(tmp_path / "plain" / "model.ckpt"), global_step=step)

    (tmp_path / "plain").mkdir()
    kept = run(lambda model, session, step: write(model.snapshotter().take(session), folder))
    assert kept == run(plain)
    assert files(folder) == files(tmp_path / "plain")


def test_a_checkpoint_is_written_and_then_announced(folder: Path) -> None:
    model = variables(max_to_keep=1)
    names = [{f"model.ckpt-{step}.{end}" for end in ("data-00000-of-00001", "index", "meta")} for step in range(2)]
    with model.session() as session:
        snapshotter = model.snapshotter()
        for step in range(2):
            snapshot = snapshotter.take(session)
            path = snapshot.write(str(folder / "model.ckpt"), step)
            assert path is not None
            assert set(files(folder)) == (names[0] if step == 0 else names[0] | names[1] | {"checkpoint"})
            announce(model.saver, path, basename="model.ckpt")
            assert set(files(folder)) == names[step] | {"checkpoint"}
            session.run(model.change)


def test_meta_is_serialised_once_and_left_out_on_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = variables()
    made = []
    export = model.saver.export_meta_graph
    monkeypatch.setattr(model.saver, "export_meta_graph", lambda *a, **k: made.append(a) or export(*a, **k))
    with model.session() as session:
        snapshotter = model.snapshotter()
        write(snapshotter.take(session), folder, write_meta_graph=False)
        assert not [name for name in files(folder) if name.endswith(".meta")]
        for _ in range(2):
            session.run(model.change)
            write(snapshotter.take(session), folder)
    assert [name for name in files(folder) if name.endswith(".meta")] == ["model.ckpt-1.meta", "model.ckpt-2.meta"]
    assert len(made) == 1


@pytest.mark.parametrize("mode", ["auto", "handles", "copy"])
def test_a_saver_whose_writing_needs_the_session_blocks_or_is_refused(mode: str, tmp_path: Path, folder: Path) -> None:
    from tensorflow.python.training.saver import BulkSaverBuilder

    class Builder(BulkSaverBuilder):
        def save_op(self, filename_tensor: Any, saveables: Any) -> Any:
            counted = v1.assign_add(counter, 1)
            with tf.control_dependencies([counted]):
                return super().save_op(filename_tensor, saveables)

    with building() as model:
        counter = v1.get_variable("counter", [], tf.int32, initializer=v1.zeros_initializer(), use_resource=False)
        model.change = tf.no_op()
        model.saver = v1.train.Saver([model.step], builder=Builder())
    if mode != "auto":
        with pytest.raises(ValueError, match="counter is a VariableV2, which has state in the session"):
            model.snapshotter(mode)
        return
    snapshotter = model.snapshotter()
    assert snapshotter.mode == "blocking"
    assert snapshotter.reason == "saves block: counter is a VariableV2, which has state in the session"
    with model.session() as session:
        save_plainly(model, session, tmp_path / "plain", 0)
        snapshot = snapshotter.take(session)
        assert snapshot.blocking
        write(snapshot, folder)
        assert files(folder) == files(tmp_path / "plain")
        assert session.run(counter) == 2


def test_a_saver_with_its_own_save_works_unless_it_wants_the_session(tmp_path: Path, folder: Path) -> None:
    class Loud(v1.train.Saver):
        ask: Any = None

        def save(self, sess: Any, *arguments: Any, **options: Any) -> Any:
            if self.ask is not None:
                sess.run(self.ask)
            return super().save(sess, *arguments, **options)

    with building() as model:
        model.change = tf.no_op()
        model.saver = Loud([model.step])
    with model.session() as session:
        save_plainly(model, session, tmp_path / "plain", 0)
        write(model.snapshotter().take(session), folder)
        assert files(folder) == files(tmp_path / "plain")
        model.saver.ask = "global_step:0"
        with pytest.raises(SaveError, match="ran 'global_step:0'.*snapshot=\"blocking\""):
            write(model.snapshotter().take(session), folder)
        model.saver.ask = model.probes[0]
        write(model.snapshotter("blocking").take(session), folder)


def test_an_empty_saver_writes_its_meta(tmp_path: Path, folder: Path) -> None:
    with building(var_list={}, allow_empty=True) as model:
        model.change = tf.no_op()
    with model.session() as session:
        assert save_plainly(model, session, tmp_path / "plain", 0) is None
        snapshot = model.snapshotter().take(session)
        assert not snapshot.blocking
        assert write(snapshot, folder) is None
    assert files(folder) == files(tmp_path / "plain")


def test_a_dropped_snapshot_cannot_be_written(folder: Path) -> None:
    model = variables()
    with model.session() as session:
        for mode in ("auto", "blocking"):
            snapshot = model.snapshotter(mode).take(session)
            snapshot.drop()
            snapshot.drop()
            with pytest.raises(RuntimeError, match="dropped"):
                write(snapshot, folder)


def test_wrong_arguments() -> None:
    model = variables()
    with pytest.raises(ValueError, match="'fast'"):
        model.snapshotter("fast")
    with pytest.raises(ValueError, match="the saver is of another graph"):
        Snapshotter(tf.Graph(), model.saver)


def test_a_missing_folder_is_named_as_the_plain_saver_does(folder: Path) -> None:
    model = variables()
    with model.session() as session:
        snapshot = model.snapshotter().take(session)
        with pytest.raises(ValueError, match="doesn't exist, can't save"):
            write(snapshot, folder / "no" / "where")
