"""A small transformer learns a text letter by letter, on the CPU, and can be killed at any moment.

    python examples/train_transformer.py --run runs/letters --steps 200 --every 20

Run it again with the same arguments and it goes on where the newest checkpoint left it. Weights, optimizer,
learning rate, the order of the batches and the random numbers of dropout are all part of the state, so the end is
the same, bit for bit, however often it was interrupted.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import midstride as ms

DATA = Path(__file__).parent / "data"
CONTEXT = 64
BATCH = 8
WIDTH, HEADS, LAYERS = 192, 4, 3


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.after_attention = nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        x = x + self.after_attention(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.perceptron(x)


class LetterModel(nn.Module):
    """From letters (batch, length) to the logits of each next letter (batch, length, alphabet)."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(alphabet, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, alphabet))

    def forward(self, letters: Tensor) -> Tensor:
        return self.head(self.blocks(self.letters(letters) + self.places))


class ShuffledBatches:
    """Pieces of the text in a random order, shuffled anew for each pass; where it stands is its state."""

    def __init__(self, letters: Tensor) -> None:
        self._pieces = letters.unfold(0, CONTEXT + 1, CONTEXT // 2)
        self._order = torch.randperm(len(self._pieces))
        self._position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        if self._position + BATCH > len(self._order):
            self._order, self._position = torch.randperm(len(self._pieces)), 0
        pieces = self._pieces[self._order[self._position : self._position + BATCH]]
        self._position += BATCH
        return pieces[:, :-1], pieces[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._position = state["order"], state["position"]


class Training:
    """Everything that a step of training changes, made from a fixed seed."""

    def __init__(self, steps: int) -> None:
        random.seed(1609)
        np.random.seed(1609)
        torch.manual_seed(1609)
        torch.use_deterministic_algorithms(True)
        text = "".join(path.read_text(encoding="utf-8") for path in sorted(DATA.glob("*.txt")))
        alphabet = sorted(set(text))
        number = {letter: index for index, letter in enumerate(alphabet)}
        self.model = LetterModel(len(alphabet))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=steps)
        self.batches = ShuffledBatches(torch.tensor([number[letter] for letter in text]))

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "batches": self.batches,
            "rng": ms.RNG(),
        }

    def train_one(self) -> Tensor:
        """One step; returns its loss, a tensor without elements to index."""
        letters, wanted = self.batches.next()
        loss = functional.cross_entropy(self.model(letters).flatten(0, 1), wanted.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()


def train(run: Path, total: int, every: int) -> None:
    training = Training(total)
    with ms.Checkpointer(run, every=ms.EverySteps(every) | ms.OnSignal(), keep=3) as ckpt:
        state = training.state()
        restored = ckpt.restore(state)  # None when nothing was ever saved here
        step = restored.step if restored else 0
        print(f"resumed at step {step}" if restored else "started at step 0", flush=True)
        while step < total and not ckpt.should_stop:
            loss = training.train_one()
            step += 1
            ckpt.step(step, state, metrics={"loss": loss})  # returns at once; saves when due
            if step % every == 0:
                print(f"step {step}: loss {loss:.4f}", flush=True)
        ckpt.save(step, state)  # the end of the run; nothing is written if it is already saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/letters"), help="the folder for checkpoints")
    parser.add_argument("--steps", type=int, default=200, help="train until this step")
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    arguments = parser.parse_args()
    train(arguments.run, arguments.steps, arguments.every)


if __name__ == "__main__":
    main()
