"""One contender of `checkpoint.py`: a process that saves and loads the same state when it is told to.

    python checkpoint_contenders.py NAME DIRECTORY MEGABYTES

It answers each word on its standard input (``save``, ``async``, ``load``, ...) with a line of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import resource
import shutil
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

WIDTH = 1024
Answers = dict[str, Callable[[], dict[str, float]]]


def body(megabytes: int) -> nn.Module:
    """Weights of so many MB, in square matrices of 4 MiB and vectors."""
    return nn.Sequential(
        *[nn.Linear(WIDTH, WIDTH) for _ in range(round(megabytes * 1e6 / 4 / (WIDTH * WIDTH + WIDTH)))]
    )


def adam(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose state is there."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-9)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def resident(key: str) -> float:
    """MB, of this process; ``VmHWM`` is the most since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024 / 1e6


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def timed(function: Callable[[], Any]) -> dict[str, float]:
    """Seconds, and the memory that was needed on the way."""
    os.sync()  # what was written before is not to be paid here
    forget_peak()
    before, used, began = resident("VmRSS"), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    function()
    seconds, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "s": seconds, "peak MB": resident("VmHWM") - before, "faults": now.ru_minflt - used.ru_minflt,
        "cpu s": now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime,
    }  # fmt: skip


def resumed(optimizer: torch.optim.Optimizer, load: Callable[[], None]) -> dict[str, float]:
    """`timed`, from where a run that goes on begins: the weights are there, and the optimizer has no state. The memory
    that was freed is given back to the system, so that nobody reads into what was touched already."""
    optimizer.state.clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return timed(load)


def fresh(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    return path


def by_torch(place: Path, module: nn.Module) -> Answers:
    optimizer, path = adam(module), place / "state.pt"

    def save() -> None:
        torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def load() -> None:
        state = torch.load(path, weights_only=True)
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])

    def write() -> dict[str, float]:
        fresh(path)
        return timed(save)

    return {"save": write, "load": lambda: resumed(optimizer, load), "reload": lambda: timed(load)}


def by_dcp(place: Path, module: nn.Module) -> Answers:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import async_save

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    optimizer = adam(module)

    def state() -> dict[str, Any]:
        packed = optimizer.state_dict()["state"]
        flat = {f"{number}/{key}": value for number, values in packed.items() for key, value in values.items()}
        return {"module": module.state_dict(), "optimizer": flat}

    def save() -> dict[str, float]:
        fresh(place / "dcp")
        return timed(lambda: dcp.save(state(), checkpoint_id=place / "dcp", no_dist=True))

    def behind() -> dict[str, float]:
        fresh(place / "behind")
        found: list[Any] = []
        answer = timed(lambda: found.append(async_save(state(), checkpoint_id=place / "behind", no_dist=True)))
        began = time.perf_counter()
        found[0].result()
        return answer | {"total s": answer["s"] + time.perf_counter() - began}

    def load() -> None:
        dcp.load(state(), checkpoint_id=place / "dcp", no_dist=True)

    def load_new() -> None:
        """DCP fills what is there. This is the least that makes it: `get_optimizer_state_dict` would make gradients
        and take a step."""
        for one in module.parameters():
            made = {"step": torch.empty(()), "exp_avg": torch.empty_like(one), "exp_avg_sq": torch.empty_like(one)}
            optimizer.state[one] = made
        load()

    return {
        "save": save,
        "async": behind,
        "load": lambda: resumed(optimizer, load_new),
        "reload": lambda: timed(load),
    }


def copies(place: Path, module: nn.Module) -> Answers:
    """The least that a save behind the training can cost: a copy into memory that is there."""
    optimizer = adam(module)
    tensors = [*module.state_dict().values(), *[v for s in optimizer.state.values() for v in s.values()]]
    buffers = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]

    def copy() -> None:
        with torch.no_grad():
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor)

    return {"async": lambda: timed(copy)}


def in_a_fit(place: Path, module: nn.Module, kind: Any, trainer: Callable[[Any], Any]) -> None:
    """Serve from a hook of a fit, where a Trainer saves."""

    class Net(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = module

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return sum(parameter.sum() for parameter in self.net.parameters()) * batch.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-9)

    trainer(Net())


def by_trivet(place: Path, module: nn.Module) -> None:
    import trivet
    from trivet import capture
    from trivet.checkpoint import directory

    class Serve(trivet.Callback):
        saves = True

        def on_update_end(self, trainer: Any, module: Any) -> None:
            run = module._run
            path, behind = place / "trivet", place / "behind"

            def save(path: Path) -> dict[str, float]:
                fresh(path)
                return timed(lambda: trainer.save_checkpoint(path))

            def unsummed() -> dict[str, float]:
                with patch.object(zlib, "crc32", lambda data, value=0: 0):
                    return save(place / "unsummed")

            def start() -> dict[str, float]:
                fresh(behind)
                found: list[Any] = []
                answer = timed(lambda: found.append(trainer.save_checkpoint_async(behind)))
                began = time.perf_counter()
                found[0].wait()
                return answer | {"total s": answer["s"] + time.perf_counter() - began}

            def read() -> None:
                state = directory.read(path, capture.template(run))
                capture.load_optimizers(run.engine, state, path)

            load = {"load": lambda: resumed(run.engine.optimizers[0], read), "reload": lambda: timed(read)}
            serve({"save": lambda: save(path), "unsummed": unsummed, "async": start, **load})

    def fit(net: Any) -> None:
        trainer = trivet.Trainer(
            accelerator="cpu", max_steps=1, callbacks=[Serve()], enable_checkpointing=False, logger=False,
            enable_progress_bar=False, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(net, torch.utils.data.DataLoader(torch.ones(1, 1)))

    in_a_fit(place, module, trivet.Module, fit)


def by_lightning(place: Path, module: nn.Module) -> None:
    import pytorch_lightning as pl

    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    path = place / "lightning.ckpt"

    class Serve(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            def save() -> dict[str, float]:
                fresh(path)
                return timed(lambda: trainer.save_checkpoint(path))

            def load() -> None:
                state = trainer.strategy.load_checkpoint(path, weights_only=True)
                trainer.strategy.load_model_state_dict(state)
                trainer.strategy.load_optimizer_state_dict(state)

            again = {"load": lambda: resumed(trainer.optimizers[0], load), "reload": lambda: timed(load)}
            serve({"save": save, **again})

    def fit(net: Any) -> None:
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_steps=1, callbacks=[Serve()], enable_checkpointing=False, logger=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(net, torch.utils.data.DataLoader(torch.ones(1, 1)))

    in_a_fit(place, module, pl.LightningModule, fit)


def serve(answers: Answers) -> None:
    print(json.dumps({"ready": sorted(answers)}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


def main() -> None:
    name, place, megabytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = {"torch": by_torch, "dcp": by_dcp, "copy": copies, "trivet": by_trivet, "lightning": by_lightning}[name](
        place, body(megabytes)
    )
    if found is not None:
        serve(found)


if __name__ == "__main__":
    main()
