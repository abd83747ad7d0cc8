"""DeepSpeed: its engine owns backward, the optimizer's step, clipping and accumulation; ZeRO stages 0 to 3."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.optim import Optimizer
from trivet import gradients
from trivet.checkpoint.convert_deepspeed import CLASSES
from trivet.errors import CheckpointError, ConfigurationError, PluginBroken, TrivetError
from trivet.plugins import APPLIED, Choice, Clip, Context, MicroBatch, Policy, StepResult, Strategy
from trivet.scaling import LossScaler
from trivet.strategies import deepspeed_config as configuration
from trivet.strategies.deepspeed_engine import Loss, Root, imports, load

FOLDER, TAG, ABOUT = "deepspeed", "state", "about.json"


class DeepSpeed(Strategy):
    """Training by a DeepSpeed engine (Rajbhandari et al. 2020), configured by our flags, a DeepSpeed file, or both.

    Args:
        stage: the ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters. 2 where
            neither this nor the file says.
        offload_optimizer: keep the optimizer state in the host's memory; stages 1 to 3.
        config: path of a DeepSpeed JSON file, or its content. What flags decide must be the same there, be ``"auto"``,
            or be missing.
    """

    own_wire = True  # its engine's communication_data_type
    reasons: Mapping[str, str] = {
        "replaced_layers": "DeepSpeed's engine casts, flattens and cuts the parameters of layers, and others than the "
        "user's were not tried in it. --strategy ddp, zero2 or fsdp take them.",
    }

    def __init__(
        self,
        stage: int | None = None,
        offload_optimizer: bool | None = None,
        config: str | dict[str, Any] | None = None,
    ) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise PluginBroken(
                "strategy 'deepspeed' needs the package deepspeed, which is not installed. Install it with: "
                "pip install 'trivet[deepspeed]'"
            )
        self.config = config
        self.file = configuration.read(config)
        zero = self.file.get("zero_optimization") or {}
        self.stage = zero.get("stage", 2) if stage is None else stage
        offloaded = (zero.get("offload_optimizer") or {}).get("device", "none")
        self.offload_optimizer = offloaded != "none" if offload_optimizer is None else offload_optimizer
        self.offload_device = offloaded if offload_optimizer is None else "cpu" if offload_optimizer else "none"
        if self.stage not in (0, 1, 2, 3):
            raise ConfigurationError(f"deepspeed: stage={self.stage!r}; DeepSpeed has the stages 0, 1, 2 and 3.")
        if self.offload_optimizer and self.stage == 0:
            raise ConfigurationError(
                "deepspeed: offload_optimizer=True needs stage 1, 2 or 3; at stage 0 every rank holds the whole state."
            )
        for axis, sentence in self._contradictions(Choice()):
            if axis == "strategy":  # the other flags are not known here
                raise ConfigurationError(f"deepspeed: {sentence}")
        self.joint_forward = self.stage == 3
        self.engine: Any = None
        self._root: Root | None = None
        self._checked = False
        self._made_group = self._set_local_rank = False

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"several_processes", "accumulation", "clipping"})

    def notes(self, world_size: int, deterministic: bool) -> tuple[str, ...]:
        what = ("nothing", "optimizer state", "optimizer state and gradients", "optimizer state, gradients, parameters")
        notes = [f"deepspeed stage {self.stage}: sharded over {world_size} processes: {what[self.stage]}"]
        if self.stage >= 2:
            notes.append("deepspeed reduces gradients in every micro-batch, also when accumulating")
        return tuple(notes)

    def refuses(self, choice: Choice) -> Iterator[tuple[str, str]]:
        policy = choice.policy
        if policy is not None and policy.param not in configuration.NAMES:
            yield "precision", f"DeepSpeed has no engine for parameters in {_name(policy.param)}."
        if policy is not None and torch.float16 in (policy.param, policy.compute) and choice.device_type == "cpu":
            yield "precision", "DeepSpeed has no float16 on the CPU."
        if choice.clip is not None and choice.clip.algorithm != "norm":
            yield "clip", f"DeepSpeed clips by the global norm only, not by {choice.clip.algorithm!r}."
        if choice.on_skip is not None:
            yield "on_skip", "DeepSpeed reduces gradients in backward, which a rank cannot leave out."
        yield from self._contradictions(choice)

    def state_dtype(self, policy: Policy) -> torch.dtype:
        return torch.float32  # its engines for 16 bits step a copy

    def _contradictions(self, choice: Choice) -> Iterator[tuple[str, str]]:
        return configuration.contradictions(self.file, self.config, self._wishes(choice))

    def _wishes(self, choice: Choice) -> list[configuration.Wish]:
        return list(configuration.wishes(choice, self.stage, self.offload_device))

    # ------------------------------------------------------------------------------------------------------ building

    def shard(self, root: nn.Module, context: Context) -> nn.Module:
        self.context = context
        self.engine, self._checked = None, False
        self.trainable = {param for param in root.parameters() if param.requires_grad}
        choice = Choice(context.device.type, context.policy, context.clip, context.accumulate)
        for _, sentence in self._contradictions(choice):  # once more: accumulation may follow from the data
            raise ConfigurationError(f"deepspeed: {sentence}")
        scalars = [name.removeprefix("module.") for name, param in root.named_parameters() if param.dim() == 0]
        if scalars:
            raise ConfigurationError(
                f"deepspeed: {', '.join(scalars)} has no dimension, and DeepSpeed cannot send such a parameter. Give "
                "it the shape (1,), or use --strategy ddp, fsdp or zero."
            )
        self._wanted = self._wishes(choice)
        gradients.broadcast_(root, context.world)  # DeepSpeed sends no buffers
        if context.policy.param != torch.float32:
            self.laid_out = (
                f"a float32 copy of the {_name(context.policy.param)} parameters is what the optimizer steps"
            )
        self._root = Root(root)
        return self._root

    def wrap_optimizer(self, root: nn.Module, optimizer: Optimizer) -> None:
        """Build DeepSpeed's engine around the step and the optimizer. All ranks."""
        if self.engine is not None:
            raise ConfigurationError("deepspeed: its engine has one optimizer, and configure_optimizers made several.")
        if optimizer.state and any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
            raise ConfigurationError(
                f"{type(optimizer).__name__} has state already: it has stepped before DeepSpeed could share it. Build "
                "a new optimizer, or resume from a checkpoint."
            )
        deepspeed = load(self.context.device.type)
        world = self.context.world
        if not torch.distributed.is_initialized():  # DeepSpeed wants a group for one process, too
            backend = deepspeed.accelerator.get_accelerator().communication_backend_name()
            store = HashStore()
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
            self._made_group = True
        config = configuration.merge(self.file, self._wanted)
        config.pop("train_batch_size", None)  # the loader decides, see _check_batch_size
        config.setdefault("train_micro_batch_size_per_gpu", 1)  # DeepSpeed must be told something
        config.setdefault("zero_allow_untested_optimizer", True)
        config.setdefault("zero_force_ds_cpu_optimizer", False)
        config.setdefault("steps_per_print", None)
        if "LOCAL_RANK" not in os.environ:  # DeepSpeed reads it again and again
            os.environ["LOCAL_RANK"], self._set_local_rank = str(world.local_rank), True
        with imports():
            self.engine, *_ = deepspeed.initialize(model=self.unwrap(root), optimizer=optimizer, config=config)
        self.engine.set_gradient_accumulation_boundary(True)
        self._optimizer = optimizer
        if self._root is not None:
            self._root.enter(self.engine)

    def unwrap(self, root: nn.Module) -> nn.Module:
        return self._root.step if self._root is not None and root is self._root else root

    def evaluate(self, root: nn.Module) -> nn.Module:
        return self.unwrap(root)  # at stage 3 with DeepSpeed's hooks on every layer

    def refresh(self, root: nn.Module) -> nn.Module:
        before = self.trainable
        if self.changed(root):
            odd = (before or set()) ^ (self.trainable or set())
            names = [name for name, param in self.unwrap(root).named_parameters() if param in odd]
            raise ConfigurationError(
                f"deepspeed: {', '.join(n.removeprefix('module.') for n in names)} was frozen or unfrozen after the "
                "engine was built, which DeepSpeed does not notice. Do it before fit, or use --strategy ddp, fsdp or "
                "zero."
            )
        return root

    # -------------------------------------------------------------------------------------------------------- update

    def no_sync(self, root: nn.Module) -> AbstractContextManager[Any]:
        return self._inner()

    @contextmanager
    def _inner(self) -> Iterator[None]:
        """Micro-batches that are not the last of their update, however many this update has."""
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

    def forward_backward(self, root: nn.Module, batches: Iterable[MicroBatch], scale: float | None) -> None:
        if self.engine is None:
            raise ConfigurationError("deepspeed: configure_optimizers returned no optimizer, which its engine needs.")
        super().forward_backward(root, batches, scale)

    def one_batch(self, root: nn.Module, micro: MicroBatch, scale: float | None) -> None:
        if not self._checked:
            self._check_batch_size(micro)
        super().one_batch(root, micro, scale)
        if micro.output is None:
            raise TrivetError(
                f"training_step returned None for batch {micro.index}, and DeepSpeed reduces gradients in backward, "
                'which a rank cannot leave out. Return a loss, or use --strategy ddp --on_skip "update".'
            )

    def _check_batch_size(self, micro: MicroBatch) -> None:
        self._checked = True
        accumulate, world_size = self.context.accumulate, self.context.world.world_size
        for name, share in (("train_micro_batch_size_per_gpu", 1), ("train_batch_size", accumulate * world_size)):
            if name in self.file and self.file[name] != micro.samples * share:
                raise ConfigurationError(
                    f"deepspeed: {configuration.of(self.config)} says {name} = {self.file[name]!r}, but the loader's "
                    f"micro-batches have {micro.samples:g} samples, with {accumulate} of them in an update on "
                    f'{world_size} processes. Let them agree, or write "auto" into the file.'
                )

    def backward(self, root: nn.Module, loss: Tensor) -> None:
        """The engine's backward, inside the module's own and its hooks where there are some."""
        loss = loss.clone()  # of a loss that is the step's very output DeepSpeed divides the gradient once more
        if self.context.backward is Tensor.backward:
            self.engine.backward(loss, scale_wrt_gas=False)  # its weight divides it already
        else:
            self.context.backward(loss.as_subclass(Loss).through(self.engine))

    def optimizer_step(
        self,
        root: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        clip: Clip | None,
        scaler: LossScaler | None,
        before_step: Callable[[Optimizer], None] | None = None,
    ) -> StepResult:
        """DeepSpeed's step: clip by the global norm, step, gather. ``before_step`` sees gradients as it holds them."""
        if clip != self.context.clip:
            raise ConfigurationError(
                f"deepspeed: asked to clip with {clip!r} in a step, but its engine was built with "
                f"{self.context.clip!r}."
            )
        if before_step is not None:
            for optimizer in optimizers:
                before_step(optimizer)
        norm = None
        if clip is not None and self.engine.optimizer is self._optimizer:  # stage 0 in float32 keeps no norm
            norm = gradients.total_norm(gradients.of(optimizers))
        self.engine.step()
        if not self.engine.was_step_applied():
            return StepResult(applied=False)
        if clip is None:
            return APPLIED
        found = self.engine.get_global_grad_norm() if norm is None else norm
        return StepResult(norm=torch.as_tensor(found, dtype=torch.float32))

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        """Nothing: the engine's step clears gradients, and the optimizer's point into buffers that it keeps."""

    # --------------------------------------------------------------------------------------------------------- state

    def from_optimizer(self, optimizer: Optimizer, param: nn.Parameter, key: str, value: Any) -> Any:
        """Of a gradient, the whole one that DeepSpeed keeps; its state is never asked for, see ``own_folder``."""
        if key != "grad" or value is not None or self.engine is None or not param.requires_grad:
            return value
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(param)

    def state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Whole tensors; at stage 3 gathered one after the other, on all ranks, into the host's memory."""
        state: dict[str, Tensor] = module.state_dict()
        if self.engine is None or self.stage < 3:
            return state
        whole: dict[nn.Parameter, Tensor] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            if param not in whole:
                with self._gathered([param]):
                    whole[param] = param.detach().cpu().clone()
            state[name] = whole[param]
        return state

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.clone()  # below stage 3 it is a part of DeepSpeed's flat one, all of which would be written

    @contextmanager
    def full_parameters(self, module: nn.Module, writeback: bool) -> Iterator[None]:
        with self._gathered(list(module.parameters()), writeback):
            yield
        if writeback and self.engine is not None and self.engine.optimizer is not self._optimizer:
            self.engine.optimizer.refresh_fp32_params()

    def _gathered(self, params: list[nn.Parameter], writeback: bool = False) -> AbstractContextManager[Any]:
        """Parameters whole on all ranks; rank 0's are the ones that are written back."""
        if self.engine is None or self.stage < 3:
            return nullcontext()
        import deepspeed

        rank = 0 if writeback else None
        gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(params, modifier_rank=rank)
        return gathered

    @property
    def own_folder(self) -> str | None:  # type: ignore[override]
        """Everything but stage 0 in float32 has optimizer state in DeepSpeed's flat form."""
        return None if self.engine is None or self.engine.optimizer is self._optimizer else FOLDER

    def _about(self) -> dict[str, Any]:
        dtype = _name(self.context.policy.param)
        return {"stage": self.stage, "world_size": self.context.world.world_size, "parameters": dtype}

    def save_own(self, root: nn.Module, folder: Path) -> None:
        if self.engine is None:
            raise CheckpointError("DeepSpeed's engine ended with fit: save while it runs, in a callback.")
        self.engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
        if self.context.world.rank == 0:
            (folder / ABOUT).write_text(json.dumps(self._about()), encoding="utf-8")
        torch.distributed.barrier()  # all ranks: every file is there

    def load_own(self, root: nn.Module, folder: Path) -> None:
        stored, mine = json.loads((folder / ABOUT).read_text(encoding="utf-8")), self._about()
        if stored != mine:
            raise CheckpointError(
                f"{str(folder)!r} was written by DeepSpeed with {stored}, and this run has {mine}; DeepSpeed resumes "
                "only where they are the same."
            )
        for file in sorted(folder.rglob("*.pt")):  # DeepSpeed unpickles whatever they name
            named = set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
            if odd := sorted(named - set(CLASSES)):
                names = ", ".join(odd)
                raise CheckpointError(f"{str(file)!r} would make objects of {names}, which are not DeepSpeed's.")
        found, _ = self.engine.load_checkpoint(str(folder), tag=TAG, load_lr_scheduler_states=False)
        if found is None:
            raise CheckpointError(f"DeepSpeed found nothing to load in {str(folder)!r}.")

    # ----------------------------------------------------------------------------------------------------------- end

    def release(self, root: nn.Module) -> None:
        """Give the module plain, whole parameters again. All ranks."""
        if self.engine is None or self.stage < 3:
            return
        step = self.unwrap(root)
        state = self.state_dict(step)
        fresh: dict[nn.Parameter, nn.Parameter] = {}
        for name, param in list(step.named_parameters(remove_duplicate=False)):
            if param not in fresh:
                fresh[param] = nn.Parameter(state[name].to(param.device), requires_grad=param.requires_grad)
            owner, _, attribute = name.rpartition(".")
            setattr(step.get_submodule(owner), attribute, fresh[param])

    def teardown(self, root: nn.Module) -> None:
        if self._set_local_rank:
            del os.environ["LOCAL_RANK"]  # left behind, it would look like a launcher's
            self._set_local_rank = False
        if self.engine is None and not self._made_group:
            return
        import deepspeed

        engine, self.engine = self.engine, None
        if self._root is not None:
            self._root.enter(self._root.step)
        if engine is not None:
            engine.destroy()
        # else its groups would outlive the process group that they are parts of
        deepspeed.comm.destroy_process_group(None if self._made_group else engine.data_parallel_group)
        self._made_group = False


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
