"""PyTorch's global generators: the CPU's and every CUDA device's."""

from __future__ import annotations

import logging
from typing import Any

import torch

_log = logging.getLogger("midstride")


def get_random_state() -> dict[str, Any]:
    """The generators' states as tensors of bytes."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    # A device that was never used has no state to lose, and asking for it would start CUDA.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put them back. Devices that this machine lacks are named in a warning."""
    torch.set_rng_state(torch.as_tensor(state["cpu"]))
    saved = state.get("cuda", [])
    here = torch.cuda.device_count() if saved else 0
    for device, device_state in enumerate(saved[:here]):
        torch.cuda.set_rng_state(torch.as_tensor(device_state), device)
    if len(saved) > here:
        _log.warning(
            "random state of %d CUDA devices was saved, this machine has %d: the rest was left out", len(saved), here
        )
