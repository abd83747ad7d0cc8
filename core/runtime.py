"""Runtime: the same composition of plugins for people who write their own loop."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import capture
from .capabilities import AS_LAUNCHED, resolve
from .checkpoint import directory
from .checkpoint.background import Background, Pending
from .data.evaluation import EvalData
from .engine import Engine, build
from .errors import ConfigurationError
from .flags import seconds_of
from .launch import environments, profiles
from .launch.group import Group
from .launch.launcher import Launcher
from .launch.world import World
from .plugins import Accelerator, Clip, Precision, StepResult, Strategy
from .runtime_module import RuntimeModule
from .scaling import LossScaler
from .seeding import derive, seed_all
from .state import TrainState
from .switches import products
from .workers import leaves_result


class RuntimeOptimizer:
    """An optimizer whose ``step`` keeps the order of an update: reduce, unscale, check, clip, step."""

    def __init__(self, optimizer: Optimizer, runtime: Runtime) -> None:
        self.optimizer, self._runtime = optimizer, runtime

    def step(self) -> StepResult:
        return self._runtime.step(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._runtime.zero_grad(self, set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class Runtime:
    """Strategy, accelerator and precision for a plain PyTorch loop::

        def train(runtime):
            model = Net()
            model, optimizer = runtime.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for x, y in runtime.setup_dataloader(loader):
                optimizer.zero_grad()
                runtime.backward(F.cross_entropy(model(x), y))
                optimizer.step()

        Runtime(strategy="ddp", devices=2, precision="bf16").launch(train)

    ``timeout`` is that of `Trainer`: the run ends where a rank has not got on for so long, with no step, forward, batch
    of `setup_dataloader` or collective. Raises PlanError where the combination cannot work, before any process starts.
    """

    def __init__(
        self,
        *,
        accelerator: str | Accelerator | Mapping[str, Any] = "auto",
        strategy: str | Strategy | Mapping[str, Any] = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        node_rank: int | None = None,
        main_address: str | None = None,
        main_port: int | None = None,
        precision: str | int | Precision | Mapping[str, Any] = "fp32",
        launcher: str | Launcher | Mapping[str, Any] = "auto",
        comm_profile: str | None = None,
        timeout: float | str | timedelta | dict[str, int] | None = None,
    ) -> None:
        self._request: dict[str, Any] = {k: v for k, v in locals().items() if k not in ("self", "timeout")}
        self.timeout = seconds_of(timeout, "timeout")
        resolved = resolve(world=environments.detect(), **self._request)
        self.plan, self._launcher, self._where = resolved.plan, resolved.launcher, resolved.where
        self.world = World()
        self._engines: list[Engine] = []
        self._modules: list[RuntimeModule] = []
        self._clips: dict[Optimizer, Clip] = {}
        self._scaler: LossScaler | None = None
        self._group: Group | None = None
        self.seed = 0
        self.updates = self.batches = 0  # in this process: steps of optimizers, and batches of all loaders

    # ---------------------------------------------------------------------------------------------------- processes

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(runtime, *args)`` in every process of the run and return what rank 0's call returned.

        Starts processes where the plan has several and no environment did. The result travels through a file.
        """
        world = environments.detect()
        seed = torch.initial_seed() & (2**63 - 1)
        if world is not None or self._launcher is None:
            return self.call(world or World(), seed, function, args)
        with tempfile.TemporaryDirectory(prefix="trivet-result-") as name:
            parts = {"runtime": self, "function": function, "args": args, "seed": seed}
            where = self._where and {**self._where, "timeout": self.timeout}
            self._launcher.plugin.launch("trivet.runtime:work", parts, self.plan, run_dir=Path(name), **where)
            return torch.load(Path(name) / "result.pt", weights_only=False)  # written by our own worker

    def call(self, world: World, seed: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What `launch` does in each process."""
        self._connect(world)
        failed = True
        try:
            self.seed = int(self._active().exchange("seed", str(seed))[0])
            seed_all(derive(self.seed, world.rank))
            with products(self._resolved.precision.plugin.policy.matmul):
                result = function(self, *args)
            self._background.settle()
            failed = False
        except BaseException as error:
            if (first := self._active().settle(error)) is not error:
                raise first from error
            raise
        finally:
            self._release()
            self._active().close(abort=failed)
            self._group = None
        return result

    def _release(self) -> None:
        """Let go of what holds the process group before it is closed: the last one that lets go can wait for ever."""
        self._background.close()
        for engine in self._engines:
            engine.strategy.teardown(engine.root)
            engine.root = engine.step
        for module in self._modules:
            module.guard.remove()
        self._engines.clear()
        self._modules.clear()
        gc.collect()
        self.accelerator.teardown()

    def _connect(self, world: World) -> None:
        self._resolved = resolve(world=world, **{**self._request, **AS_LAUNCHED})
        self.plan, self.world = self._resolved.plan, world
        self.accelerator: Accelerator = self._resolved.accelerator.plugin
        accelerator, others = self.accelerator, (self._resolved.strategy.plugin, self._resolved.precision.plugin)
        accelerator.wanted = frozenset().union(*(plugin.needs.accelerator for plugin in others))
        profiles.apply(self.plan.comm_profile, os.environ, world.local_world_size)
        self.device: torch.device = accelerator.device(self.plan.device_index(world.local_rank))
        accelerator.setup(self.device)
        backend = self.plan.backend if world.world_size > 1 else None
        self._group = Group.open(world, backend, self.device, timeout=self.timeout)
        self._group.watch_over(self._pulse, self._whereabouts, self.timeout)
        self._background = Background(world.rank, world.world_size)

    def _pulse(self) -> tuple[object, ...]:
        return (self.updates,), self.batches, [module.calls for module in self._modules]

    def _whereabouts(self) -> str:
        return f"update {self.updates}, batch {self.batches}"

    def __getstate__(self) -> dict[str, Any]:
        nothing = dict.fromkeys(("_group", "_scaler", "_background"))
        return {**self.__dict__, **nothing, "_engines": [], "_modules": [], "_clips": {}}

    def _active(self) -> Group:
        if self._group is None:
            raise ConfigurationError("this works only inside the function that runtime.launch(function) calls.")
        return self._group

    # --------------------------------------------------------------------------------------------------- the loop

    def setup(self, module: nn.Module, *optimizers: Optimizer) -> Any:
        """Convert, move and lay out a module; returns it alone, or ``(module, optimizer, ...)``. All ranks call it.

        An optimizer built over ``module.parameters()`` before is kept: its parameters are exchanged where the precision
        or the strategy made new ones.
        """
        self._active()
        before = dict(module.named_parameters())
        strategy, precision = self._resolved.strategy.plugin, self._resolved.precision.plugin
        if self._engines:
            raise ConfigurationError("runtime.setup was called twice; put several networks into one module.")
        engine = build(
            module,
            plan=self.plan,
            strategy=strategy,
            accelerator=self._resolved.accelerator.plugin,
            precision=precision,
            world=self.world,
            device=self.device,
        )
        after = dict(engine.module.named_parameters())
        exchange = {old: after[name] for name, old in before.items() if after.get(name) is not old}
        for optimizer in optimizers:
            if exchange and optimizer.state:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} has state already; call setup before the first step."
                )
            for group in optimizer.param_groups:
                group["params"] = [exchange.get(param, param) for param in group["params"]]
            strategy.wrap_optimizer(engine.root, optimizer)
            precision.wrap_optimizer(optimizer)
        engine.optimizers = list(optimizers)
        if precision.scaling is not None:
            self._scaler = LossScaler(precision.scaling)
        self._engines.append(engine)
        wrapped = RuntimeModule(engine)
        self._modules.append(wrapped)
        if not optimizers:
            return wrapped
        return (wrapped, *(RuntimeOptimizer(optimizer, self) for optimizer in optimizers))

    def setup_dataloader(self, loader: Iterable[Any], *, shuffle_seed: int | None = None) -> Iterable[Any]:
        """This rank's batches, on its device, each batch of the loader on one rank, the same number on every rank.

        The batches of a last turn that are fewer than the ranks are left out; with one process nothing is.
        """
        return _Batches(self, loader, shuffle_seed)

    def backward(self, loss: Tensor) -> None:
        """Backward, with the loss scaled as the precision wants it."""
        engine = self._engine()
        if not self._modules[0].called:
            raise self._modules[0].past("backward was called for a loss that was computed")
        engine.strategy.backward(engine.root, loss * self._scaler.scale if self._scaler is not None else loss)

    def no_sync(self) -> AbstractContextManager[Any]:
        """A context for the inner micro-batches of an accumulated update: backward does not communicate."""
        engine = self._engine()
        return engine.strategy.no_sync(engine.root)

    def clip(self, optimizer: RuntimeOptimizer, value: float, algorithm: str = "norm") -> None:
        """Clip this optimizer's gradients in its next step, where it is right: after they are reduced and unscaled."""
        self._clips[optimizer.optimizer] = Clip(value, algorithm)

    def step(self, optimizer: RuntimeOptimizer) -> StepResult:
        """Reduce, unscale, check, clip, step. All ranks call it; the result says whether the step was applied."""
        engine = self._engine()
        raw = optimizer.optimizer
        self.updates += 1
        result = engine.strategy.optimizer_step(
            engine.root, [raw], clip=self._clips.pop(raw, None), scaler=self._scaler
        )
        if self._scaler is not None:
            self._scaler.update()
        engine.root = engine.strategy.refresh(engine.root)
        if len(engine.optimizers) == 1:  # with several a forward may serve all of them
            self._modules[0].called = False
        return result

    def zero_grad(self, optimizer: RuntimeOptimizer, set_to_none: bool = True) -> None:
        """Clear the gradients of an optimizer."""
        self._engine().strategy.zero_grad(optimizer.optimizer, set_to_none)

    def gather(self, tensor: Tensor) -> Tensor:
        """Stack a tensor of the same shape from all ranks: ``(world_size, *shape)``. All ranks call it."""
        if self.world.world_size == 1:
            return tensor.unsqueeze(0)
        parts = [torch.empty_like(tensor) for _ in range(self.world.world_size)]
        torch.distributed.all_gather(parts, tensor.contiguous())  # all ranks
        return torch.stack(parts)

    def save(self, path: str | Path, **user: Any) -> None:
        """Write module, optimizers and plain data of your own as a checkpoint directory. All ranks call it."""
        own, state = capture.own_writer(self._engine()), self._state(user)
        self._background.join()
        directory.write(path, state, rank=self.world.rank, world_size=self.world.world_size, own=own)

    def save_async(self, path: str | Path, **user: Any) -> Pending:
        """`save`, which returns as soon as the state is copied; a thread writes it. All ranks call it.

        One is on its way at a time, and the next waits for it. `Pending.wait` raises what went wrong, and so does the
        end of `launch`, which waits too, where nobody was told.
        """
        if capture.own_writer(self._engine()) is not None:
            raise ConfigurationError(
                f"runtime.save_async({str(path)!r}): strategy {self.plan.strategy!r} writes its state into a folder of "
                "its own, which cannot be done while training goes on. Use runtime.save."
            )
        return self._background.start(path, self._state(user))

    def _state(self, user: dict[str, Any]) -> TrainState:
        if odd := user.keys() & {"save_async", "async_save", "blocking"}:
            raise ConfigurationError(
                f"runtime.save({min(odd)}=...) would store that as data of yours. To go on while it is written call "
                "runtime.save_async(path, ...)."
            )
        engine = self._engine()
        return TrainState(
            module=engine.strategy.state_dict(engine.module),
            optimizers=capture.optimizer_states(engine),
            scaler=self._scaler.state_dict() if self._scaler is not None else None,
            user=user,
            plan=self.plan.to_dict(),
        )

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a checkpoint that any strategy wrote at any world size; returns the data given to `save`."""
        engine = self._engine()
        template = TrainState(module=engine.strategy.state_dict(engine.module))
        everywhere = partial(
            self._active().exchange, "checkpoint", "", 1800.0
        )  # a damaged file on one rank changes none
        with directory.reading(path, template, before=everywhere) as state:
            capture.load_optimizers(engine, state, path)
        if self._scaler is not None and state.scaler is not None:
            self._scaler.load_state_dict(state.scaler)
        return state.user

    def _engine(self) -> Engine:
        if not self._engines:
            raise ConfigurationError("call runtime.setup(module, ...) first, inside the launched function.")
        return self._engines[0]


class _Batches:
    """A loader's batches, dealt in turn."""

    def __init__(self, runtime: Runtime, loader: Iterable[Any], seed: int | None) -> None:
        self.runtime, self.loader = runtime, loader
        self.seed = runtime.seed if seed is None else seed
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        runtime, world = self.runtime, self.runtime.world
        data = EvalData(self.loader, rank=world.rank, world_size=world.world_size, seed=derive(self.seed, self.epoch))
        self.epoch += 1
        accelerator = runtime.accelerator
        whole = len(self) * world.world_size if world.world_size > 1 else None
        for batch, index, _ in data:
            if whole is None or index < whole:
                runtime.batches += 1
                yield accelerator.to_device(batch, runtime.device) if accelerator.moves_batches else batch

    def __len__(self) -> int:
        return len(self.loader) // self.runtime.world.world_size  # type: ignore[arg-type]


def work(parts: Mapping[str, Any], world: World, out_dir: Path) -> None:
    """What each worker of a launcher does."""
    runtime: Runtime = parts["runtime"]
    result = runtime.call(world, parts["seed"], parts["function"], parts["args"])
    if leaves_result(world):
        torch.save(result, out_dir / "result.pt")
