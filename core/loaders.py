"""Which loaders a job has, and what is read of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from .data.combined import CombinedLoader, combined, eval_data, evaluation_loaders
from .data.datamodule import DataModule
from .data.evaluation import EvalData
from .data.sharding import derive_accumulation
from .data.train import TrainData
from .errors import ConfigurationError
from .hooks import check_loaders, overrides
from .module import Module

if TYPE_CHECKING:
    from .job import Job
    from .launch.world import World
    from .run import Run
    from .trainer import Trainer

KINDS = {"validate": "validation", "test": "test", "predict": "predict"}  # what jobs and what hooks call it
SHORT = {"validation": "val", "test": "test", "predict": "predict"}  # what loaders and limits call it


def load(
    trainer: Trainer, job: Job, world: World, loader: Any, *, accumulate: int, seed: int
) -> dict[str, list[EvalData]]:
    """This rank's side of the data: the training data for the trainer, and by kind what is evaluated."""
    if job.stage == "fit":
        trainer.dataloaders["train"] = loader
        trainer.train_data = TrainData(
            combined(loader),
            rank=world.rank,
            world_size=world.world_size,
            accumulate=accumulate,
            seed=seed,
            uneven=trainer.uneven,
            limit=trainer.limit_train_batches,
            weigh=job.module.batch_weight if overrides(job.module, Module, "batch_weight") else None,
        )
        if trainer.overfit_batches:
            trainer.train_data.keep_order()
    trainer.eval_data = {
        kind: [
            eval_data(one, rank=world.rank, world_size=world.world_size, seed=seed, limit=limit)
            for one in eval_loaders(trainer, job, kind)
        ]
        for kind, limit in (
            ("validation", trainer.limit_val_batches),
            ("test", trainer.limit_test_batches),
            ("predict", trainer.limit_predict_batches),
        )
    }
    return trainer.eval_data


def reloading(run: Run, job: Job, read: Callable[[Run], None]) -> Callable[[], None] | None:
    """What asks for the loaders anew where an epoch begins, by ``reload_dataloaders_every_n_epochs``; ``read`` looks at
    those that were got."""
    trainer = run.trainer
    every = int(trainer.reload_dataloaders_every_n_epochs)
    if not every:
        return None
    if job.train_dataloaders is not None:
        raise ConfigurationError(
            f"reload_dataloaders_every_n_epochs={every}, but fit was given the training loader itself. Let the module "
            "or a data module have train_dataloader(), which is asked again."
        )

    def reload() -> None:
        if run.progress.epoch % every or run.progress.epoch == run.loaded_in:
            return
        run.close_data()
        loader, size, world_size = training(job), trainer.global_batch_size, run.world.world_size
        assert run.train_data is not None
        if size is not None:
            run.accumulate = derive_accumulation(size, getattr(loader, "batch_size", None), world_size)
        else:  # what a scheduler of it, or the checkpoint, has set since
            run.accumulate = -(-run.train_data.batches_per_update // world_size)
        run.data = load(trainer, job, run.world, loader, accumulate=run.accumulate, seed=run.seed)
        run.train_data, run.loaded_in = trainer.train_data, run.progress.epoch
        read(run)

    return reload


def says_sizes(given: Any) -> bool:
    """Whether loaders know how many samples are in a batch: torch's with a batch size, a batch sampler, or a sampler of
    lists."""
    for loader in evaluation_loaders(given) if isinstance(given, (list, tuple)) else [given]:
        if isinstance(loader, DataLoader):
            plain = type(loader.sampler) in (SequentialSampler, RandomSampler)
            if loader.batch_sampler is None and (plain or isinstance(loader.dataset, IterableDataset)):
                return False
        elif loader is not None and not isinstance(loader, (CombinedLoader, Mapping)):
            return False
    return True


def own_hook(job: Job, name: str) -> Callable[..., Any] | None:
    """The data module's override of a hook for batches, or the module's, or None."""
    if job.datamodule is not None and overrides(job.datamodule, DataModule, name):
        found: Callable[..., Any] = getattr(job.datamodule, name)
        return found
    return getattr(job.module, name) if overrides(job.module, Module, name) else None


def training(job: Job) -> Any:
    """The training loader that was given, or the data module's, or the module's own."""
    if job.train_dataloaders is not None:
        return job.train_dataloaders
    return (job.datamodule if job.datamodule is not None else job.module).train_dataloader()


def eval_loaders(trainer: Trainer, job: Job, kind: str) -> list[Any]:
    """The loaders of a kind as a list; none in a fit where there is no validation step or none are given."""
    module, asked = job.module, KINDS.get(job.stage) == kind
    given = job.val_dataloaders if kind == "validation" and not asked else job.dataloaders if asked else None
    if not asked and (kind != "validation" or job.stage != "fit"):
        return []
    name = SHORT[kind]
    if kind != "predict" and not overrides(module, Module, f"{kind}_step"):
        if asked or given is not None:
            raise ConfigurationError(
                f"{type(module).__name__} has no {kind}_step(batch, batch_idx), but {kind} data was given."
            )
        return []
    if getattr(trainer, f"limit_{name}_batches") == 0:
        return []
    if given is None:
        owner, base = (module, Module) if job.datamodule is None else (job.datamodule, DataModule)
        given = getattr(owner, f"{name}_dataloader")() if overrides(owner, base, f"{name}_dataloader") else None
    if given is None:
        if asked:
            raise ConfigurationError(
                f"{job.stage} was given no loader, and neither the data module nor the module has one."
            )
        return []
    trainer.dataloaders[name] = given
    found = evaluation_loaders(given)
    if found:
        check_loaders(kind, len(found), module, trainer.callbacks)
    shuffles = any(isinstance(getattr(one, "sampler", None), RandomSampler) for one in found)
    if kind == "predict" and shuffles and trainer.is_global_zero:
        warnings.warn(
            "predict was given a loader that shuffles: predictions come in that order, not in the data set's. Give "
            "shuffle=False.",
            stacklevel=2,
        )
    return found
