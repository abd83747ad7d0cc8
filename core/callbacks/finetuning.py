"""BaseFinetuning and BackboneFinetuning: layers that are frozen at first and trained from some epoch on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.optim import Optimizer

from ..errors import CheckpointError, ConfigurationError
from .callback import Callback

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer

Modules = nn.Module | Iterable["Modules"]


class BaseFinetuning(Callback):
    """Freezes layers before training and unfreezes them later.

    Override `freeze_before_training`, which freezes, and `finetune_function`, which unfreezes at its epoch and gives
    the parameters to the optimizer. Let ``configure_optimizers`` take only parameters with ``requires_grad``. What was
    unfrozen is stored in checkpoints; a resumed run has the same parameters in the same groups.
    """

    def __init__(self) -> None:
        self._groups: dict[int, list[list[str]]] = {}  # optimizer -> names in each group that was added
        self._trains: dict[str, list[str]] = {"parameters": [], "norms": []}  # by name; norms: BatchNorm that tracks
        self._run: tuple[Trainer, Module] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None}

    # ------------------------------------------------------------------------------------------------- to override

    def freeze_before_training(self, module: Module) -> None:
        """Freeze what is not to be trained at first. Called before the optimizers are made."""
        raise NotImplementedError(f"{type(self).__name__} has no freeze_before_training(module).")

    def finetune_function(self, module: Module, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze what is to be trained from ``epoch`` on, counted from 0. Called at its start, for each optimizer."""
        raise NotImplementedError(f"{type(self).__name__} has no finetune_function(module, epoch, optimizer).")

    # ----------------------------------------------------------------------------------------------------- to call

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """The modules that hold parameters themselves, or have no submodules."""
        if isinstance(modules, nn.ModuleDict):
            modules = modules.values()
        if isinstance(modules, nn.Module):
            found = list(modules.modules())
        else:
            found = [part for one in modules for part in BaseFinetuning.flatten_modules(one)]
        return [part for part in found if not list(part.children()) or list(part.parameters(recurse=False))]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """The parameters that do, or do not, require gradients; without those of BatchNorm if not ``train_bn``."""
        for part in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(part, BatchNorm):
                yield from (p for p in part.parameters(recurse=False) if p.requires_grad == requires_grad)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze one module's own parameters, and BatchNorm's statistics."""
        _set(module, False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze modules; BatchNorm goes on training unless ``train_bn`` is False."""
        for part in BaseFinetuning.flatten_modules(modules):
            _set(part, isinstance(part, BatchNorm) and train_bn)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze modules."""
        for part in BaseFinetuning.flatten_modules(modules):
            _set(part, True)

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules and give what the optimizer does not have yet to it, as a group.

        Its learning rate is ``lr``, or that of the optimizer's first group divided by ``initial_denom_lr``.
        """
        BaseFinetuning.make_trainable(modules)
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        params = [p for p in BaseFinetuning.filter_params(modules, train_bn=train_bn) if id(p) not in held]
        if params:
            rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
            optimizer.add_param_group({"params": params, "lr": rate})

    # ------------------------------------------------------------------------------------------------------- hooks

    def state_dict(self) -> dict[str, Any]:
        if self._run is not None:
            self._trains = _training(self._run[1])
        return {"groups": {str(number): groups for number, groups in self._groups.items()}, "trains": self._trains}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """While a run is resumed: before its optimizers are filled, which shall have the groups that they had."""
        self._groups = {int(number): [list(names) for names in groups] for number, groups in state["groups"].items()}
        self._trains = state["trains"]
        if self._run is not None:
            self._restore(*self._run)

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        if stage == "fit":
            self._groups, self._run = {}, (trainer, module)
            self.freeze_before_training(module)

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        if trainer.strategy.own_folder is not None:
            raise ConfigurationError(
                f"{type(self).__name__}: this strategy takes no parameters into its optimizer later on. "
                "Use --strategy fsdp, zero or ddp."
            )

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        names = {id(param): name for name, param in module.named_parameters()}
        for number, optimizer in enumerate(trainer.optimizers):
            before = len(optimizer.param_groups)
            self.finetune_function(module, trainer.progress.epoch, optimizer)
            for group in optimizer.param_groups[before:]:
                self._groups.setdefault(number, []).append([names[id(param)] for param in group["params"]])

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        if self._run is not None:
            self._trains = _training(module)
            self._run = None

    def _restore(self, trainer: Trainer, module: Module) -> None:
        params = dict(module.named_parameters())
        for name, param in params.items():
            param.requires_grad_(name in self._trains["parameters"])
        for name, part in module.named_modules():
            if isinstance(part, BatchNorm):
                part.track_running_stats = name in self._trains["norms"]
        for number, groups in self._groups.items():
            for names in groups:
                missing = sorted(set(names) - set(params))
                if missing:
                    raise CheckpointError(f"{type(self).__name__}: the module has no parameter {missing[0]!r}.")
                trainer.optimizers[number].add_param_group({"params": [params[name] for name in names]})


def _set(module: nn.Module, trains: bool) -> None:
    """Freeze or unfreeze what a module holds itself."""
    if isinstance(module, BatchNorm):
        module.track_running_stats = trains
    for param in module.parameters(recurse=False):
        param.requires_grad_(trains)


def twice(epoch: int) -> float:
    """The factor of `BackboneFinetuning` by default."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Trains all but ``module.backbone`` at first, and the backbone too from an epoch on, at a growing learning rate.

    Args:
        unfreeze_backbone_at_epoch: the epoch, counted from 0.
        lambda_func: what the backbone's learning rate is multiplied by in each later epoch, by its number.
        backbone_initial_ratio_lr: its learning rate at first, as a part of that of the rest.
        backbone_initial_lr: the same as a number, instead.
        should_align: let it not become higher than that of the rest.
        initial_denom_lr: see `BaseFinetuning.unfreeze_and_add_param_group`.
        train_bn: False keeps the backbone's BatchNorm out of the optimizer.
        verbose: print both learning rates in each epoch.
        rounding: digits that are printed.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = twice,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch, self.lambda_func = unfreeze_backbone_at_epoch, lambda_func
        self.backbone_initial_ratio_lr, self.backbone_initial_lr = backbone_initial_ratio_lr, backbone_initial_lr
        self.should_align, self.initial_denom_lr, self.train_bn = should_align, initial_denom_lr, train_bn
        self.verbose, self.rounding = verbose, rounding
        self.previous_backbone_lr: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.previous_backbone_lr = state["previous_backbone_lr"]
        super().load_state_dict(state)

    def freeze_before_training(self, module: Module) -> None:
        self.freeze(self._backbone(module))

    def finetune_function(self, module: Module, epoch: int, optimizer: Optimizer) -> None:
        rate = float(optimizer.param_groups[0]["lr"])
        if epoch == self.unfreeze_backbone_at_epoch:
            first = self.backbone_initial_lr
            self.previous_backbone_lr = rate * self.backbone_initial_ratio_lr if first is None else first
            self.unfreeze_and_add_param_group(
                self._backbone(module), optimizer, self.previous_backbone_lr, self.initial_denom_lr, self.train_bn
            )
        elif epoch > self.unfreeze_backbone_at_epoch and self.previous_backbone_lr is not None:
            grown = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            self.previous_backbone_lr = min(grown, rate) if self.should_align else grown
            optimizer.param_groups[-1]["lr"] = self.previous_backbone_lr
        if self.verbose and self.previous_backbone_lr is not None:
            digits = self.rounding
            module.print(f"lr: {round(rate, digits)}, backbone lr: {round(self.previous_backbone_lr, digits)}")

    def _backbone(self, module: Module) -> nn.Module:
        found = getattr(module, "backbone", None)  # the user's
        if not isinstance(found, nn.Module):
            raise ConfigurationError(
                f"BackboneFinetuning: {type(module).__name__} has no submodule 'backbone', which it would train later."
            )
        return found


def _training(module: nn.Module) -> dict[str, list[str]]:
    """The names of what is trained: parameters, and BatchNorm modules that track their statistics."""
    norms = [name for name, part in module.named_modules() if isinstance(part, BatchNorm) and part.track_running_stats]
    return {"parameters": [name for name, param in module.named_parameters() if param.requires_grad], "norms": norms}
