"""Consistent snapshots of what a ``tf.train.Checkpoint`` saves, written later by TensorFlow's own saver.

TensorFlow walks the object graph and gathers what each object saves. For variables that is a callable which reads when
the file is written; here all of them are read at once, on the training thread:

- A resource variable gives its own buffer, not a copy: an update of a variable whose buffer somebody else holds
  allocates a new one first, be it dense, sparse, sliced or compiled. Reading it takes a fraction of a millisecond,
  and the first update after it pays a copy. One on an accelerator is copied to the host's memory.
- Anything else is copied: what a DenseHashTable exports is live memory.
- Variants (``tf.data`` iterators) are values of their own, which nothing changes.

What TensorFlow does not show anybody else is used here and nowhere else: ``Checkpoint._saver``, its
``_gather_serialized_tensors``, ``MultiDeviceSaver``, ``SaveSpec``, and two functions of its eager context.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint.functional_saver import MultiDeviceSaver
from tensorflow.python.eager import context
from tensorflow.python.training.saving.saveable_object import SaveSpec


class ObjectSnapshot:
    """What a ``tf.train.Checkpoint`` would have written when this was made.

    Make it on the training thread, in eager mode, between two steps.
    """

    def __init__(self, checkpoint: Any) -> None:
        gathered, _, self._registered, _ = checkpoint._saver._gather_serialized_tensors()
        for owner, items in list(gathered.items()):
            shared = tf.__internal__.ops.is_resource_variable(getattr(owner, "obj", owner))
            gathered[owner] = {
                key: {part: _resolve(key, part, item, shared) for part, item in _parts(value).items()}
                for key, value in items.items()
            }
        self._gathered = gathered
        self.blocking = bool(self._registered)
        """It has objects that write their own files from what they are at that time: ``write`` before training goes
        on."""

    def write(self, path: str, options: Any = None) -> None:
        """Write data and index, on any thread. The folder must exist. May be called again after it failed."""
        if self._gathered is None:
            raise RuntimeError("this snapshot was dropped; take another")
        # Where eager mode is not the process's default it is the caller's thread's alone; and where operations are
        # asynchronous, they are waited for.
        with context.eager_mode():
            MultiDeviceSaver(self._gathered, self._registered).save(tf.constant(path), options=options)
            context.async_wait()

    def drop(self) -> None:
        """Let go of the buffers. Does nothing the second time."""
        self._gathered = self._registered = None


def _parts(value: Any) -> dict[str, Any]:
    """What is saved under one key: the whole, or slices of it by their names."""
    return value if isinstance(value, dict) else {"": value}


def _resolve(key: str, part: str, item: Any, shared: bool) -> Any:
    """A specification with the same name, slice and device, whose tensor is the one of now."""
    if isinstance(item, SaveSpec):
        with tf.device(item.device):
            tensor = item.tensor
        name, part = item.name, item.slice_spec
    else:
        name, tensor = key, item
    if tensor is not None:  # a variable without a value has none
        tensor = _in_host_memory(tensor) if shared else _copy(tensor)
    return SaveSpec(lambda: tensor, part, name, item.dtype, item.device)


def _in_host_memory(tensor: Any) -> Any:
    """Itself, if it is there. A variable stands for its value here."""
    if isinstance(tensor, tf.Tensor) and ":CPU:" in tensor.device:
        return tensor
    with tf.device(_host_of(tensor)):
        return tf.identity(tensor)


def _host_of(tensor: Any) -> Any:
    return tf.DeviceSpec.from_string(tensor.device).replace(device_type="CPU", device_index=0)


def _copy(tensor: Any) -> Any:
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype == tf.variant:
        return tensor
    try:
        with tf.device(_host_of(tensor)):
            return tf.raw_ops.DeepCopy(x=tensor)
    except tf.errors.OpError:  # it knows no float8 and no quantized types
        return tf.constant(tensor.numpy(), tensor.dtype)
