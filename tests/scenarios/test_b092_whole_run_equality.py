"""A run with shuffling, dropout and random noise that is killed at any step and resumed in a new process
sees the same batches and ends with the same weights, bit for bit, as one that was never interrupted.

One process that has loaded PyTorch, and has one thread, forks a new one for each part of a run.
"""

from __future__ import annotations

import json
from pathlib import Path

from children import run_well

_SCRIPT = """
    import json, os, random, signal, sys
    import numpy as np
    import torch
    import midstride as ms

    TOTAL, EPOCH, BATCH = 30, 10, 4

    class Loader:
        # Shuffled anew in each epoch; its state is the permutation, the place in it and the generator.
        def __init__(self, seed):
            self.generator = torch.Generator().manual_seed(seed)
            self.order, self.at = torch.empty(0, dtype=torch.int64), 0

        def next_batch(self):
            if self.at == len(self.order):
                self.order, self.at = torch.randperm(EPOCH * BATCH, generator=self.generator), 0
            self.at += BATCH
            return self.order[self.at - BATCH : self.at]

        def state_dict(self):
            return {"generator": self.generator.get_state(), "order": self.order, "at": self.at}

        def load_state_dict(self, state):
            self.generator.set_state(state["generator"])
            self.order, self.at = state["order"], state["at"]

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()    # imports a lot, once for all

    def run(folder, log, kill_after):
        seed = os.getpid() if os.path.exists(folder) else 1    # a resumed run must not depend on its own seed
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        data = torch.arange(EPOCH * BATCH * 6, dtype=torch.float32).reshape(-1, 6).sin()
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=TOTAL + 1)
        loader = Loader(seed)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "rng": ms.RNG()}
        with ms.Checkpointer(folder, every=5, keep=2) as ckpt:
            restored = ckpt.restore(state)
            step = restored.step if restored else 0
            while step < TOTAL:
                batch = loader.next_batch()
                x = data[batch] + 0.1 * torch.randn(BATCH, 6) + float(np.random.rand()) + random.random()
                optimizer.zero_grad()
                loss = (model(x) - data[batch].sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                log.write(json.dumps([step, batch.tolist(), loss.item().hex()]) + "\\n")
                log.flush()
                ckpt.step(step, state, metrics={"loss": loss})
                if step == kill_after:
                    ckpt.save(step, state).result()
                    os.kill(os.getpid(), signal.SIGKILL)
        weights = {name: tensor.numpy().tobytes().hex() for name, tensor in model.state_dict().items()}
        log.write(json.dumps(weights) + "\\n")

    def in_process(*arguments):
        child = os.fork()
        if child == 0:
            try:
                run(*arguments)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            arguments[1].flush()
            os._exit(0)
        return os.waitpid(child, 0)[1]

    root = sys.argv[1]
    for number in [0, *json.loads(sys.argv[2])]:
        with open(f"{root}/{number}.log", "w") as log:
            if number:
                assert in_process(f"{root}/{number}", log, number) == signal.SIGKILL
            assert in_process(f"{root}/{number}", log, None) == 0
"""


def test_killed_at_any_step(tmp_path: Path) -> None:
    kills = [1, 9, 10, 11, 20, 29]
    run_well(_SCRIPT, tmp_path, json.dumps(kills))
    *reference, weights = (tmp_path / "0.log").read_text().splitlines()
    assert len(reference) == 30 and len(json.loads(weights)) == 4
    for number in kills:
        *steps, final = (tmp_path / f"{number}.log").read_text().splitlines()
        assert steps == reference, f"killed after step {number}"
        assert final == weights, f"killed after step {number}"
