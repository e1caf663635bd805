"""``adapters.ArrayAdapter`` for PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from midstride.adapters import ArrayLeaf, Destination, LiveObject, Report
from midstride.dtypes import DTYPES, array_nbytes
from midstride.errors import StateMismatch, UnsupportedState
from midstride.numpy_arrays import slabs
from midstride.torch import modules, optimizers
from midstride.tree import Node, Path, Tree, pointer

_NAMES: dict[torch.dtype, str] = {
    dtype: name for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in _NAMES.items()}
# PyTorch has these names too, as bit-packing placeholders with no storage of their own.
for _name in ("int1", "int2", "int4", "uint1", "uint2", "uint4"):
    _NAMES.pop(_DTYPES.pop(_name), None)

_PACKED = "float4_e2m1fn_x2"
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class TorchAdapter:
    """Tensors on any device, ``nn.Module`` and ``Optimizer``."""

    lib = "torch"

    def leaf(self, value: Any, path: Path) -> ArrayLeaf | None:
        if not isinstance(value, torch.Tensor):
            return None
        name = _NAMES.get(value.dtype)
        plain = type(value) in _PLAIN_TENSORS and value.layout == torch.strided
        if name is None or not plain or value.is_meta or value.is_nested:
            raise UnsupportedState(f"{pointer(path) or '/'}: {_why_refused(value)}. Nothing was written")
        count, size = value.numel(), value.element_size()
        address = value.data_ptr() if count else None
        # A storage at address 0 (cheaper to ask than the storage itself) was freed, as sharding wrappers leave
        # them between uses: to read it would end the process.
        if address is not None and address == value.storage_offset() * size:
            raise UnsupportedState(f"{pointer(path) or '/'}: the tensor's memory was freed. Nothing was written")
        return ArrayLeaf(path, name, tuple(value.shape), count * size, value, address, self)

    def memory_key(self, value: torch.Tensor) -> tuple[Any, ...]:
        flags = (value.is_conj(), value.is_neg())
        return (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), flags)

    def object_state(self, value: Any) -> tuple[Any, dict[str, Any]] | None:
        if isinstance(value, torch.nn.Module):
            return modules.state_of(value)
        if isinstance(value, torch.optim.Optimizer):
            return value.state_dict(), {}
        return None

    def annotate(self, objects: list[LiveObject]) -> None:
        for live in objects:
            if isinstance(live.value, torch.optim.Optimizer):
                live.notes.update(optimizers.notes(live.value, objects))

    def synchronize(self, leaves: list[ArrayLeaf]) -> None:
        # A tensor may be the work of any stream of its device, so every stream is waited for.
        for device in {leaf.source.device for leaf in leaves if leaf.source.is_cuda}:
            torch.cuda.synchronize(device)

    @torch.inference_mode(False)  # a view is kept: made in that mode it could not be written outside it
    def view(self, leaf: ArrayLeaf, out: np.ndarray) -> torch.Tensor:
        return _over(out, leaf.source.dtype).view(leaf.shape)

    def copy(self, leaves: list[ArrayLeaf], views: list[torch.Tensor]) -> None:
        sources = [leaf.source if leaf.dtype != _PACKED else _copyable(leaf.source) for leaf in leaves]
        with torch.no_grad():
            # One call for all: the loop runs without the interpreter lock.
            torch._foreach_copy_(views, sources)

    def copy_part(self, leaf: ArrayLeaf, first: int, last: int, out: np.ndarray) -> None:
        source = _copyable(leaf.source)
        packed = _over(out, leaf.source.dtype)
        with torch.no_grad():
            for index, begin, end in slabs(leaf.shape, first, last):
                part = source[index]
                packed[begin - first : end - first].view(part.shape).copy_(part)

    @torch.inference_mode(False)
    def new_array(self, dtype: str, shape: tuple[int, ...], like: Any = None) -> Destination:
        if dtype not in _DTYPES:
            raise StateMismatch(f"PyTorch has no dtype {dtype}; restore this array into NumPy")
        # NumPy's allocator asks for huge pages, PyTorch's does not: filling fresh memory is then
        # bound by the disk and not by page faults.
        buffer = np.empty(array_nbytes(dtype, shape), np.uint8)
        tensor = _viewed(buffer, _DTYPES[dtype]).view(shape)

        def finish() -> torch.Tensor:
            if like is None:
                return tensor
            placed = tensor.to(like.device)
            if isinstance(like, torch.nn.Parameter):
                return torch.nn.Parameter(placed, requires_grad=like.requires_grad)
            return placed.requires_grad_(like.requires_grad) if like.is_leaf and like.requires_grad else placed

        return Destination(buffer, finish)

    def fill(self, value: torch.Tensor) -> Destination:
        plain = value.device.type == "cpu" and value.is_contiguous() and not value.is_conj() and not value.is_neg()
        if plain:
            view = value.detach().reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)
            return Destination(view.numpy(), lambda: value, in_place=True)
        fresh = self.new_array(_NAMES[value.dtype], tuple(value.shape))

        def finish() -> torch.Tensor:
            with torch.no_grad():
                value.copy_(fresh.finish())
            return value

        return Destination(fresh.buffer, finish)

    def convert(self, array: torch.Tensor, like: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        if not in_place:
            return array.to(like.device, like.dtype)
        with torch.no_grad():
            return like.copy_(array)

    def is_object(self, value: Any) -> bool:
        return isinstance(value, torch.nn.Module | torch.optim.Optimizer)

    def fit(self, value: Any, saved: Node, objects: list[LiveObject], report: Report) -> tuple[Tree, Any]:
        if isinstance(value, torch.optim.Optimizer):
            return optimizers.fit(value, saved, objects, report), None
        return modules.fit(value, saved)

    def load(self, value: Any, state: Any, saved: Node, strict: bool) -> None:
        if isinstance(value, torch.optim.Optimizer):
            optimizers.load(value, state)
        else:
            modules.load(value, state, saved, strict)


def _why_refused(value: torch.Tensor) -> str:
    if value.is_nested:
        return "nested tensors cannot be saved; save their values and offsets"
    if value.is_meta:
        return "a tensor on the meta device has no data to save"
    if value.is_quantized:
        return "quantized tensors cannot be saved; save int_repr() and the scales"
    if value.layout != torch.strided:
        return f"tensors of layout {value.layout} cannot be saved; save their parts (indices, values)"
    if value.dtype not in _NAMES:
        return f"tensors of dtype {value.dtype} cannot be saved"
    return (
        f"a {type(value).__module__}.{type(value).__qualname__} is more than its elements, and cannot be saved as one"
    )


def _over(out: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    # Packed fp4 cannot be copied as such, so it goes as the bytes that it is.
    return _viewed(out, torch.uint8 if dtype == torch.float4_e2m1fn_x2 else dtype)


def _viewed(buffer: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    # An array without elements has stride 0 in NumPy, and PyTorch refuses to view that as a wider dtype.
    return torch.from_numpy(buffer).view(dtype) if buffer.size else torch.empty(0, dtype=dtype)


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.view(torch.uint8) if tensor.dtype == torch.float4_e2m1fn_x2 else tensor


ADAPTER = TorchAdapter()
