"""Between a running fit and a `TrainState`: what a checkpoint holds, read off a run and put back into one."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import manual
from .checkpoint.parts import errors
from .checkpoint.plain import check_plain
from .data.window import sum_over_ranks
from .errors import CheckpointError
from .hooks import call
from .plugins import OwnState
from .state import Progress, TrainState

if TYPE_CHECKING:
    from .engine import Engine
    from .launch.world import World
    from .plugins import Strategy
    from .run import Run

_ELEMENTWISE = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "prev", "step_size", "ax"),
}
OWN = "own_folder"  # instead of the state in a checkpoint's list of optimizers: the strategy's folder that holds it


def capture(run: Run, *, tensors: bool = True) -> TrainState:
    """The state of a run at an update boundary. All ranks call it. Without ``tensors`` only what has to be plain."""
    engine, trainer = run.engine, run.trainer
    callbacks = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    state = TrainState(
        callbacks={key: value for key, value in callbacks.items() if value},
        datamodule=trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
        hparams=plain_hparams(run.module.hparams.__dict__),
        seed=run.seed,
        plan=run.plan.to_dict(),
        progress=run.progress.to_dict(),
    )
    call(run.hooks.on_save_checkpoint, state.user)
    if tensors:
        state.module, state.beside = module_tensors(run)
        state.optimizers = optimizer_states(engine)
        state.strategy = strategy_tensors(engine, run.world) | manual.pending(run)
        state.schedulers = [schedule.scheduler.state_dict() for schedule in engine.schedules]
        state.scaler = engine.scaler.state_dict() if engine.scaler is not None else None
        state.data = run.train_data.state_dict() if run.train_data is not None else {}
        state.metrics = run.train_metrics.state_dict()
        state.host_noise, state.torch_noise = (_by_rank(number, run.world) for number in run.next_noise())
    return state


def check(run: Run) -> None:
    """Refuse before the first update what a checkpoint could not hold, naming the key."""
    state = capture(run, tensors=False)
    for name in ("callbacks", "datamodule", "hparams", "user"):
        check_plain(getattr(state, name), name)


def template(run: Run) -> TrainState:
    """The tensors that a checkpoint is read into, in place."""
    module, beside = module_tensors(run)
    return TrainState(module=module, beside=beside)


def module_tensors(run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a checkpoint holds under the names of the module's tensors, and beside them. All ranks call it."""
    tensors = run.engine.strategy.state_dict(run.engine.module)
    own = set(tensors)
    for callback in run.trainer.callbacks if run.train_data is not None else ():
        tensors = callback.checkpoint_tensors(run.trainer, run.module, tensors)
    beside = {name: tensor for name, tensor in tensors.items() if name not in own}
    return {name: tensor for name, tensor in tensors.items() if name in own}, beside


def restore(run: Run, state: TrainState, path: str | Path) -> None:
    """Put a state back that was read from ``path``; the module's tensors are there already. All ranks call it, before
    `on_fit_start`."""
    with errors(f"cannot resume from checkpoint {str(path)!r}"), undone(run.trainer.callbacks, state.callbacks):
        _restore(run, state, path)
    trainer = run.trainer
    if trainer.datamodule is not None:
        trainer.datamodule.load_state_dict(state.datamodule)
    call(run.hooks.on_load_checkpoint, state.user)
    run.resumed = True


def _restore(run: Run, state: TrainState, path: str | Path) -> None:
    engine, trainer = run.engine, run.trainer
    _check_shapes(state)
    if run.train_data is not None and state.data:  # a converted checkpoint has no position: its epoch begins anew
        run.train_data.load_state_dict(state.data, epochs=int(state.progress.get("epoch", 0)))
    if trainer.exact_resume:
        refuse_inexact(run, state)
    load_callbacks(trainer.callbacks, state.callbacks)  # first: one may have added groups to an optimizer, or refuse
    if len(state.schedulers) != len(engine.schedules):
        raise CheckpointError(
            f"the checkpoint holds {len(state.schedulers)} schedulers, configure_optimizers returned "
            f"{len(engine.schedules)}."
        )
    load_optimizers(engine, state, path)
    load_strategy(engine, state, run.world)
    manual.load_pending(run, state.strategy, state.plan.get("world_size"))
    for schedule, saved in zip(engine.schedules, state.schedulers, strict=True):
        schedule.scheduler.load_state_dict(saved)
    if engine.scaler is not None and state.scaler is not None:
        engine.scaler.load_state_dict(state.scaler)
    run.train_metrics.load_state_dict(state.metrics)
    run.seed = state.seed
    restored = Progress.from_dict(state.progress)
    for name in restored.to_dict():
        if name in state.progress:
            setattr(run.progress, name, getattr(restored, name))
    run.logged_at = run.progress.update
    rank, update = run.world.rank, run.progress.update + run.progress.skipped
    run.host_noise, run.torch_noise = (
        noise[rank] if rank < len(noise) else update for noise in (state.host_noise, state.torch_noise)
    )


def _check_shapes(state: TrainState) -> None:
    """What torch's optimizers keep for each element of a parameter has the parameter's shape."""
    for optimizer in state.optimizers:
        for name, values in optimizer["state"].items():
            for key in _ELEMENTWISE & values.keys():
                found, expected = getattr(values[key], "shape", None), getattr(state.module.get(name), "shape", None)
                if found is not None and expected is not None and found != expected:
                    raise CheckpointError(
                        f"the optimizer state {key!r} of {name!r} has shape {tuple(found)}, and the parameter "
                        f"{tuple(expected)}."
                    )


@contextmanager
def undone(callbacks: list[Any], states: Mapping[str, Any]) -> Iterator[None]:
    """Give callbacks that are about to load ``states`` their old state back if the block raises."""
    before = [(one, copy.deepcopy(one.state_dict())) for one in callbacks if one.state_key in states]
    try:
        yield
    except BaseException:
        for callback, old in before:
            with suppress(Exception):  # the error that is on its way is the one to be seen
                callback.load_state_dict(old)
        raise


def refuse_inexact(run: Run, state: TrainState) -> None:
    """Raise CheckpointError where the run would not go on to the bit as the one that wrote the checkpoint."""
    stored, here = state.plan, run.plan.to_dict()
    reasons = [
        f"{name} was {stored.get(name)!r} and is {here[name]!r}"
        for name in ("strategy", "accelerator", "precision", "world_size", "deterministic")
        if stored.get(name) != here[name]
    ]
    if run.plan.world_size > 2 and not run.plan.deterministic:
        reasons.append("on more than 2 processes reductions keep their order only with deterministic=True")
    if run.train_data is not None and not state.data:
        reasons.append("the checkpoint holds no position in the data")
    elif run.train_data is not None and run.train_data.inexact is not None:
        reasons.append(run.train_data.inexact)
    if reasons:
        raise CheckpointError(
            f"exact_resume=True, and this run would not go on exactly: {'; '.join(reasons)}. Without "
            "exact_resume it goes on all the same."
        )


def _by_rank(value: int, world: World) -> list[int]:
    """The value of each rank. A collective where there are several."""
    values = [0.0] * world.world_size
    values[world.rank] = float(value)
    return [int(x) for x in (sum_over_ranks(values) if world.world_size > 1 else values)]


def load_callbacks(callbacks: list[Any], states: Mapping[str, dict[str, Any]]) -> None:
    """Give each callback the state that was stored under its key."""
    for callback in callbacks:
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])


# ---------------------------------------------------------------------------------------- optimizers, by name


def optimizer_states(engine: Engine) -> list[dict[str, Any]]:
    """The state of all optimizers, or where it is: in the strategy's own folder. All ranks call it."""
    if engine.strategy.own_folder is not None:
        return [{"state": {}, "groups": [], OWN: engine.strategy.own_folder}]
    return [by_name(optimizer, engine.names, engine.strategy) for optimizer in engine.optimizers]


def own_writer(engine: Engine) -> Callable[[Path], None] | None:
    """What writes the strategy's own folder into a checkpoint's directory, or None. All ranks call that."""
    strategy, folder = engine.strategy, engine.strategy.own_folder
    return None if folder is None else lambda directory: strategy.save_own(engine.root, directory / folder)


def load_optimizers(engine: Engine, state: TrainState, path: str | Path) -> None:
    """The reverse of `optimizer_states`; ``path`` is the checkpoint's directory. All ranks call it."""
    own, writer = engine.strategy.own_folder, state.plan.get("strategy")
    stored = next((saved[OWN] for saved in state.optimizers if OWN in saved), None)
    if stored != own:
        weights = "To begin a new run from its weights: module.load_state_dict(directory.read_weights(path)), of "
        weights += "trivet.checkpoint."
        if own is None:
            raise CheckpointError(
                f"strategy {writer!r} wrote the optimizer state of this checkpoint into its own folder {stored!r}, "
                f"which no other strategy reads. To resume with any: trivet checkpoint convert {str(path)!r} -o NEW, "
                f"and resume from NEW; or resume with --strategy {writer}. {weights}"
            )
        raise CheckpointError(
            f"this strategy resumes from its own folder {own!r}, which this checkpoint of strategy {writer!r} does not "
            f"have. Resume with --strategy {writer}. {weights}"
        )
    if own is not None:
        engine.strategy.load_own(engine.root, Path(path).absolute() / own)
        return
    if len(state.optimizers) != len(engine.optimizers):
        raise CheckpointError(
            f"the checkpoint holds {len(state.optimizers)} optimizers, configure_optimizers returned "
            f"{len(engine.optimizers)}."
        )
    for optimizer, saved in zip(engine.optimizers, state.optimizers, strict=True):
        load_by_name(optimizer, saved, engine.names, engine.strategy)


def strategy_tensors(engine: Engine, world: World) -> dict[str, Tensor]:
    """What the strategy itself keeps, by the names in a checkpoint. All ranks call it."""
    own = engine.strategy.own_state(engine.root)
    apart = {f"rank{world.rank}/{name}": tensor for name, tensor in own.apart.items()}
    return {f"all/{name}": tensor for name, tensor in own.alike.items()} | apart


def load_strategy(engine: Engine, state: TrainState, world: World) -> None:
    """The reverse of `strategy_tensors`. All ranks call it, when weights and optimizers are read."""
    alike, apart = (
        {
            name.removeprefix(begin): tensor
            for name, tensor in state.strategy.items()
            if name.startswith(begin) and not manual.is_pending(name)
        }
        for begin in ("all/", f"rank{world.rank}/")
    )
    if (there := state.plan.get("world_size")) != world.world_size:
        apart = {}
    engine.strategy.load_own_state(engine.root, OwnState(alike, apart, there))


def by_name(optimizer: Optimizer, names: Mapping[Tensor, str], strategy: Strategy) -> dict[str, Any]:
    """An optimizer's state with parameter names for keys, so that it does not depend on order or wrapping. All ranks
    call it."""
    packed = optimizer.state_dict()
    order = [names_of(group["params"], names, index) for index, group in enumerate(optimizer.param_groups)]
    state = {  # in the order of the groups, which is the same on all ranks
        name: {
            key: strategy.from_optimizer(optimizer, param, key, value) for key, value in packed["state"][number].items()
        }
        for here, group, group_names in zip(optimizer.param_groups, packed["param_groups"], order, strict=True)
        for param, number, name in zip(here["params"], group["params"], group_names, strict=True)
        if number in packed["state"]
    }
    return {
        "state": state,
        "groups": [
            {**{k: v for k, v in group.items() if k != "params"}, "params": group_names}
            for group, group_names in zip(packed["param_groups"], order, strict=True)
        ],
    }


def names_of(params: list[nn.Parameter], names: Mapping[Tensor, str], group: int) -> list[str]:
    """The names of a group's parameters; one that the module doesn't own gets its place in the group."""
    return [names.get(param, f"<group {group}, parameter {index}>") for index, param in enumerate(params)]


def load_by_name(
    optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[Tensor, str], strategy: Strategy
) -> None:
    """The reverse of `by_name`. Raises CheckpointError when the groups hold other parameters."""
    packed = copy.copy(optimizer.state_dict())
    groups = []
    ids: dict[str, Any] = {}
    params: dict[str, nn.Parameter] = {}
    if len(saved["groups"]) != len(packed["param_groups"]):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved['groups'])} parameter groups, this one "
            f"{len(packed['param_groups'])}."
        )
    for index, (group, old) in enumerate(zip(packed["param_groups"], saved["groups"], strict=True)):
        here = names_of(optimizer.param_groups[index]["params"], names, index)
        stored = set(old["params"])
        frozen = [n for n, p in zip(here, optimizer.param_groups[index]["params"], strict=True) if not p.requires_grad]
        # DeepSpeed's groups have none of the frozen ones, and no optimizer keeps anything for them
        if sorted(name for name in here if name in stored or name not in frozen) != sorted(old["params"]):
            raise CheckpointError(
                f"parameter group {index} differs: only in the checkpoint {sorted(set(old['params']) - set(here))}, "
                f"only here {sorted(set(here) - set(old['params']))}."
            )
        lacking = sorted(set(group) - set(old))
        if lacking:
            raise CheckpointError(
                f"parameter group {index} of the checkpoint's optimizer has no {lacking}, which "
                f"{type(optimizer).__name__} needs: it was written with another optimizer. Use the same one, or start "
                "afresh from the weights alone."
            )
        for key, value in group.items():
            if isinstance(value, (int, float)) and not isinstance(old[key], (int, float, Tensor)):
                raise CheckpointError(f"parameter group {index}: {key} is {old[key]!r}, expected a number.")
        ids.update(zip(here, group["params"], strict=True))
        params.update(zip(here, optimizer.param_groups[index]["params"], strict=True))
        groups.append({**{k: v for k, v in old.items() if k != "params"}, "params": group["params"]})
    state = {
        ids[name]: {key: strategy.to_optimizer(optimizer, params[name], key, value) for key, value in values.items()}
        for name, values in saved["state"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    dtype = strategy.context.policy.state
    if dtype is None:
        return
    for name in saved["state"]:  # torch has cast it to the parameter's dtype
        for key, value in state[ids[name]].items():
            if isinstance(value, Tensor) and value.dim() and value.is_floating_point():
                optimizer.state[params[name]][key] = value.to(params[name].device, dtype)


# ------------------------------------------------------------------------------------------- hyperparameters


def plain_hparams(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters as plain data: classes and functions by import path. Left out with one warning: modules, and what
    no import path leads to, such as a lambda."""
    plain: dict[str, Any] = {}
    left_out = []
    for name, value in values.items():
        if isinstance(value, nn.Module):
            left_out.append(name)
        elif isinstance(value, type) or callable(value):
            path = import_path(value)
            if path is None:
                left_out.append(name)
            else:
                plain[name] = {"import_path": path}
        else:
            plain[name] = value
    if left_out:
        warnings.warn(
            "hyperparameters that are modules, or functions without an import path (lambdas, local ones), are not "
            f"stored in checkpoints: {left_out}.",
            stacklevel=2,
        )
    return plain


def import_path(value: Any) -> str | None:
    """``module:name`` where that leads back to the same class or function."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None:
        return None
    if vars(torch).get(plain := name.rpartition(".")[2]) is value:  # built-in functions do not know where they are
        return f"torch:{plain}"
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is value else None
