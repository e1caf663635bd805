"""Random state as a part of the state: Python's, NumPy's and PyTorch's."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

from midstride.errors import StateMismatch


class RNG:
    """The process's global random generators, to be put into a state: ``{"rng": ms.RNG(), ...}``.

    Holds Python's ``random``, NumPy's legacy global generator, and PyTorch's CPU and CUDA
    generators where PyTorch is loaded. Restored last, after everything that may draw numbers.
    Generators of your own (``numpy.random.Generator``, ``torch.Generator``) are saved by their
    own state: ``generator.bit_generator.state``, ``generator.get_state()``.
    """

    restore_last = True

    def state_dict(self) -> dict[str, Any]:
        """The state of all generators, as arrays and plain values."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
            "numpy": np.random.get_state(legacy=False),
        }
        if "torch" in sys.modules:
            from midstride.torch.random_state import get_random_state

            state["torch"] = get_random_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put all generators back. ``StateMismatch`` if one that was saved is not here."""
        if "torch" in state:
            try:
                from midstride.torch.random_state import set_random_state
            except ImportError as error:
                raise StateMismatch("the checkpoint has PyTorch's random state, and PyTorch is not here") from error
            set_random_state(state["torch"])
        saved = dict(state["numpy"])
        if "key" in saved["state"]:
            saved["state"] = {**saved["state"], "key": np.asarray(saved["state"]["key"])}
        np.random.set_state(saved)
        python = state["python"]
        random.setstate((python["version"], tuple(map(int, python["words"])), python["gauss"]))
