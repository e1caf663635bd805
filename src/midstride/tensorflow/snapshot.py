"""Consistent snapshots of what a ``tf.compat.v1.train.Saver`` saves, written later without the training session.

How a snapshot is taken: the tensors that the saver would write are fetched in one run of a session's *callable*.
``Session.run`` copies what it returns; a callable returns arrays over TensorFlow's own buffers, and they outlive the
session. Nothing is added to the graph, which may be finalised.

- What a ``ReadVariableOp`` returns is held as it is: an update of a variable whose buffer somebody else holds
  allocates a new one first, be it dense, sparse, sliced or compiled. Taking it costs microseconds, and the first update
  after it a copy.
- Anything else is copied before ``take`` returns: reference variables, ``Identity`` of one, and what a DenseHashTable
  exports are live memory. Strings and scalars arrive as copies.
- Variants (``tf.data`` iterators) have no form outside a session. Their save op is run once with a scratch file as its
  prefix and scalars in the place of all other tensors; the write reads the scratch file back.

How it is written: the nodes between those tensors and the save tensor are copied into a private graph, and the user's
own ``Saver.save`` runs on a stand-in for the session, which runs the private graph. So names and shards stay the
Saver's business; ``state_file`` sees to the rest of what it does.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client.session import SessionInterface

from midstride.errors import SaveError
from midstride.tensorflow.saver_graph import NotSeparable, Plan, is_empty, take_apart

_v1 = tf.compat.v1

_ALIGNMENT_BYTES = 64
"""A fed array that begins elsewhere is copied once more: 150 ms for 256 MB."""


class Snapshotter:
    """Takes snapshots of one graph through one saver, for any number of sessions, one after the other.

    ``mode`` says what is wanted: ``"handles"`` holds what can be held, ``"copy"`` copies everything before training
    goes on (for ops that write into variables without asking whether somebody holds them), ``"blocking"`` writes before
    training goes on, and ``"auto"`` is the first of these that is possible. The attribute ``mode`` is what was chosen,
    and ``reason`` says why, for the log.

    ``step`` is the global step, or its tensor, which is read in the same run.

    Raises ``ValueError`` for a mode that this graph and saver do not allow; the message names the tensor or the op.
    """

    def __init__(self, graph: Any, saver: Any, mode: str = "auto", *, step: Any = None) -> None:
        if mode not in {"auto", "handles", "copy", "blocking"}:
            raise ValueError(f'snapshot must be "auto", "handles", "copy" or "blocking", not {mode!r}')
        self.graph, self.saver = graph, saver
        self.mode: Literal["handles", "copy", "blocking"] = "blocking"
        self.reason = "saves block, as was asked for"
        self._asked = mode
        # A variable stands for the tensor of its value.
        self._step = None if step is None else graph.as_graph_element(step)
        self._plan: Plan | None = None
        self._fetch: _Fetch | None = None
        self._writer: _Writer | None = None
        self._buffers = _Buffers()
        self._meta: tuple[int, bytes] | None = None
        if mode != "blocking":
            try:
                plan = take_apart(graph, saver)
                self._writer = _Writer(plan) if plan.sources or plan.scratches else None
                self._choose(plan)
            except NotSeparable as error:
                self._fall_back(str(error))

    def _choose(self, plan: Plan) -> None:
        self._plan = plan
        copied = [source for source in plan.sources if not source.holdable]
        held = len(plan.sources) - len(copied)
        example = f"{copied[0].name} comes from a {copied[0].origin}" if copied else ""
        if self._asked == "handles" and copied and not held:
            raise ValueError(f'snapshot="handles": nothing can be held ({example}, which is live memory). Use "copy"')
        if self._asked == "copy" or (copied and not held):
            self.mode = "copy"
            self.reason = f"{len(plan.sources)} tensors are copied before training goes on"
        else:
            self.mode = "handles"
            self.reason = f"the buffers of {held} tensors are held"
        if copied and held and self.mode == "handles":
            self.reason += f", {len(copied)} are copied before training goes on ({example})"
        if plan.scratches:
            self.reason += ", variants go through a scratch file"

    def _fall_back(self, why: str) -> None:
        if self._asked != "auto":
            raise ValueError(f'snapshot="{self._asked}" is not possible here: {why}. Use "auto" or "blocking"')
        self._plan, self._fetch, self.mode, self.reason = None, None, "blocking", f"saves block: {why}"

    def take(self, session: Any) -> Snapshot:
        """Return what the saver would write now; no train op is run. Afterwards training may go on.

        The session must be the bare one, not one that runs hooks. Where other threads train in it, what comes from
        reference variables may be of several moments, as in a plain save.

        If the snapshot is ``blocking``, it holds nothing: ``write`` it before training goes on. The first call for a
        session prepares the run, as the first ``Session.run`` of these tensors would: 2 s for 2,000 variables.
        """
        if self._plan is not None and not _is_local(session):
            self._do_without_callables(self._plan)
        if self._plan is None:
            step = None if self._step is None else int(session.run(self._step))
            return Snapshot(self, step, session=session)
        if self._fetch is None or self._fetch.session is not session:
            self._fetch = _Fetch(session, self._plan, self._step)
        values, step = self._fetch.run()
        for number, source in enumerate(self._plan.sources):
            if _is_held(values[number]) and not (source.holdable and self.mode == "handles"):
                values[number] = self._buffers.copy(number, values[number])
        return Snapshot(self, step, values=values, scratch=self._fetch.run_scratches())

    def _do_without_callables(self, plan: Plan) -> None:
        if plan.scratches:
            self._fall_back(
                f"{plan.scratches[0].variants[0][0]} is a variant, and the session may be on another machine"
            )
        elif self._asked == "handles":
            raise ValueError(
                'snapshot="handles": the buffers of a remote or wrapped session cannot be held. Use "auto"'
            )
        elif self.mode == "handles":
            self.mode = "copy"
            self.reason = f"{len(plan.sources)} tensors are fetched from a remote or wrapped session"

    def forget_session(self) -> None:
        """Let go of the last session, which is kept alive until then, and of the memory kept for the next snapshot.

        Snapshots that were taken can still be written.
        """
        self._fetch, self._buffers = None, _Buffers()

    def _meta_bytes(self) -> bytes:
        # Once for each version of the graph: it takes the interpreter's lock for 0.5 s where there are 2,000 variables.
        version = self.graph.version
        if self._meta is None or self._meta[0] != version:
            self._meta = version, self.saver.export_meta_graph().SerializeToString(deterministic=True)
        return self._meta[1]


class Snapshot:
    """What the saver would have written at one moment. Free it with ``drop``, on any thread."""

    def __init__(
        self,
        owner: Snapshotter,
        step: int | None,
        *,
        session: Any = None,
        values: list[np.ndarray] | None = None,
        scratch: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        self._owner, self._session, self._values, self._scratch = owner, session, values, scratch
        self.step = step
        """The global step at that moment, if its tensor was given."""
        self.blocking = values is None
        """Nothing is held: ``write`` must be called before training goes on."""
        self.held_bytes = sum(value.nbytes for value in values or () if _is_held(value))
        self.copied_bytes = sum(value.nbytes for value in values or ()) - self.held_bytes

    def settle(self) -> None:
        """Copy what is held, on any thread. A variable that is updated after that needs no new buffer.

        The copy runs beside training, without the interpreter's lock, into memory that is kept for the next snapshot;
        the update's own copy goes into fresh memory, at two to four times the cost. Where there is no memory for it,
        the rest stays held.
        """
        values = self._values or []
        with contextlib.suppress(MemoryError):
            for number, value in enumerate(values):
                if _is_held(value):
                    values[number] = self._owner._buffers.copy(number, value)

    def write(
        self,
        save_path: str,
        global_step: int | None = None,
        *,
        write_meta_graph: bool = True,
        place: Callable[[str], str] = lambda path: path,
    ) -> str | None:
        """Let the user's saver write data, index and ``.meta``, on any thread; return what its ``save`` returns.

        The state file does not name the checkpoint yet, and no older one is deleted: ``announce`` does both.
        ``place`` is given the path that the saver chose, and says which one the files get.
        May be called again after it failed.
        """
        if self._values is None and self._session is None:
            raise RuntimeError("this snapshot was dropped; take another")
        saver = self._owner.saver
        saver_def = getattr(saver, "saver_def", None)

        def run(fetches: Any, feeds: Any) -> Any:
            if not (saver_def and _is_the_save(fetches, feeds, saver_def)):
                return self._run_other(fetches, feeds)
            path = feeds[saver_def.filename_tensor_name]
            filename = place(path)
            result = self._run_save(fetches, filename, {saver_def.filename_tensor_name: filename})
            if write_meta_graph:
                _write_file(f"{filename}.meta", self._owner._meta_bytes())
            return result if filename == path else os.fsencode(path)

        # An empty saver runs nothing, so its .meta is left to it.
        leave_meta = write_meta_graph and is_empty(saver)
        # A thread has its own default graph, and where it is an eager one a saver writes nothing.
        with self._owner.graph.as_default():
            stand_in = _StandIn(self._owner.graph, run, self._session)
            path: str | None = saver.save(
                stand_in, save_path, global_step=global_step, write_meta_graph=leave_meta, write_state=False
            )
            return path

    def _run_save(self, fetches: str, filename: str, feeds: Any) -> Any:
        if self._values is None:
            return self._session.run(fetches, feeds)
        writer = self._owner._writer
        assert writer is not None
        return writer.run(filename, self._values, self._scratch.name if self._scratch else "")

    def _run_other(self, fetches: Any, feeds: Any) -> Any:
        if self._session is not None:
            return self._session.run(fetches, feeds)
        raise SaveError(
            f"the saver's save() ran {fetches!r}, and there is no session that could: it writes a snapshot. This "
            'checkpoint was not finished, earlier ones are untouched. Use snapshot="blocking" with this saver'
        )

    def drop(self) -> None:
        """Free what is held. Does nothing the second time."""
        values, self._values, self._session = self._values, None, None
        for number, value in enumerate(values or ()):
            self._owner._buffers.give_back(number, value)
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None


class _StandIn(SessionInterface):  # type: ignore[misc]
    """What ``Saver.save`` sees of a session. Of a blocking snapshot's it sees everything."""

    def __init__(self, graph: Any, run: Callable[[Any, Any], Any], session: Any) -> None:
        self._graph, self._run, self._session = graph, run, session

    @property
    def graph(self) -> Any:
        return self._graph

    def run(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        return self._run(fetches, feed_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class _Fetch:
    """The runs of one session that a snapshot needs."""

    def __init__(self, session: Any, plan: Plan, step: Any) -> None:
        self.session = session
        self._plan = plan
        fetched = [source.name for source in plan.sources] + ([] if step is None else [step.name])
        self._run: Callable[[], list[Any]] = lambda: list(session.run(fetched))
        if _is_local(session):
            self._run = _callable(session, fetch=fetched)
        self._run_scratches = [
            _callable(session, feed=[scratch.prefix, *(name for name, _ in scratch.replaced)], target=[scratch.op])
            for scratch in plan.scratches
        ]

    def run(self) -> tuple[list[np.ndarray], int | None]:
        """The sources' values, and the step."""
        values = self._run()
        step = int(values.pop()) if len(values) > len(self._plan.sources) else None
        return [np.asarray(value, object if isinstance(value, bytes) else None) for value in values], step

    def run_scratches(self) -> tempfile.TemporaryDirectory[str] | None:
        if not self._plan.scratches:
            return None
        folder = tempfile.TemporaryDirectory(prefix="midstride-", ignore_cleanup_errors=True)
        for number, scratch in enumerate(self._plan.scratches):
            prefix = _string(_scratch_prefix(folder.name, number))
            self._run_scratches[number](prefix, *(value for _, value in scratch.replaced))
        return folder


class _Writer:
    """The private graph and its session: few threads, no accelerator, nothing of the training session."""

    def __init__(self, plan: Plan) -> None:
        graph = tf.Graph()
        with graph.as_default():
            filename = _v1.placeholder(tf.string, [])
            data = [_v1.placeholder(source.dtype) for source in plan.sources]
            prefixes = [_v1.placeholder(tf.string, []) for _ in plan.scratches]
            inputs = {plan.filename: filename}
            inputs |= {source.name: tensor for source, tensor in zip(plan.sources, data, strict=True)}
            for prefix, scratch in zip(prefixes, plan.scratches, strict=True):
                for name, key in scratch.variants:
                    inputs[name] = tf.raw_ops.RestoreV2(
                        prefix=prefix, tensor_names=[key], shape_and_slices=[""], dtypes=[tf.variant]
                    )[0]
            try:
                [result] = tf.graph_util.import_graph_def(
                    plan.nodes, input_map=inputs, return_elements=[plan.result], name="saver"
                )
            except ValueError as error:
                raise NotSeparable(f"{plan.result} cannot be made in another graph: {error}") from error
        config = _v1.ConfigProto(
            device_count={"GPU": 0},
            intra_op_parallelism_threads=1,
            inter_op_parallelism_threads=2,
            use_per_session_threads=True,
        )
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        fed = [tensor.name for tensor in (filename, *data, *prefixes)]
        # Not ``Session.run``: for 2,000 variables that takes 50 ms more, most of them under the interpreter's lock.
        self._run = _callable(_v1.Session(graph=graph, config=config), feed=fed, fetch=[result.name])
        self._scratches = len(prefixes)

    def run(self, filename: str, values: Sequence[np.ndarray], scratch: str) -> Any:
        prefixes = [_scratch_prefix(scratch, number) for number in range(self._scratches)]
        return self._run(_string(filename), *values, *map(_string, prefixes))[0]


class _Buffers:
    """Memory for copies, one piece for each source, used again: a copy into fresh memory costs three times as much."""

    def __init__(self) -> None:
        self._free: dict[int, np.ndarray] = {}

    def copy(self, number: int, value: np.ndarray) -> np.ndarray:
        buffer = self._free.pop(number, None)
        if buffer is None or buffer.nbytes < value.nbytes + _ALIGNMENT_BYTES:
            buffer = np.empty(value.nbytes + _ALIGNMENT_BYTES, np.uint8)
        begin = -buffer.ctypes.data % _ALIGNMENT_BYTES
        piece = buffer[begin : begin + value.nbytes]
        # As bytes: NumPy copies those without the interpreter's lock, whatever the dtype.
        np.copyto(piece, value.reshape(-1).view(np.uint8))
        return piece.view(value.dtype).reshape(value.shape)

    def give_back(self, number: int, value: np.ndarray) -> None:
        if isinstance(value.base, np.ndarray):
            self._free[number] = value.base


def _is_held(value: np.ndarray) -> bool:
    """Its memory is TensorFlow's. Arrays of our own have none beneath them, or one of ``_Buffers``."""
    return value.base is not None and not isinstance(value.base, np.ndarray)


def _scratch_prefix(folder: str, number: int) -> str:
    return os.path.join(folder, str(number))


def _string(text: str) -> np.ndarray:
    return np.asarray(text, object)


def _is_local(session: Any) -> bool:
    """It has callables, and its files are ours. Sessions wrapped by debuggers have only ``run``; those of a server have
    callables, but a tensor that is fetched twice fails there."""
    return hasattr(session, "_make_callable_from_options") and not session.sess_str


def _callable(session: Any, **options: list[str]) -> Callable[..., Any]:
    made: Callable[..., Any] = session._make_callable_from_options(config_pb2.CallableOptions(**options))
    return made


def _is_the_save(fetches: Any, feeds: Any, saver_def: Any) -> bool:
    feeds = feeds or {}
    is_save = isinstance(fetches, str) and fetches == saver_def.save_tensor_name
    return is_save and len(feeds) == 1 and saver_def.filename_tensor_name in feeds


def _write_file(path: str, content: bytes) -> None:
    """Through TensorFlow, since the folder may be on any file system that it knows."""
    unfinished = f"{path}.tmp{uuid.uuid4().hex}"
    with tf.io.gfile.GFile(unfinished, "wb") as file:
        file.write(content)
    tf.io.gfile.rename(unfinished, path, overwrite=True)
