"""FSDP: parameters, gradients and optimizer state are sharded; each unit is gathered for its forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from trivet import gradients, materialize
from trivet.errors import ConfigurationError, TrivetError
from trivet.layout import sharded
from trivet.plugins import Context, MicroBatch, StepResult, Strategy
from trivet.strategies import sharded_step, units
from trivet.torch_compat import remove_fully_shard

PLACEMENTS = ("rows", "even")


class FSDP(Strategy):
    """Fully sharded data parallelism on torch's ``fully_shard``, known as FSDP2 (Zhao et al. 2023).

    Sharding units are what the module's own method ``blocks()`` returns, a list of submodules that are called; without
    it they follow from ``unit_classes`` or ``unit_size_mb``. The rest of the module is a unit of its own.

    Args:
        unit_classes: names of classes; the outermost submodules of these classes are units.
        unit_size_mb: without ``unit_classes``, submodules that hold so many MiB of parameters are units.
        reshard_after_forward: free a unit's whole parameters after its forward and gather them again for its backward
            (True), keep them (False), keep them sharded over so many ranks (a number), or keep those of the rest only
            (None).
        prefetch: gather so many units ahead of the one that runs; 0 leaves it to torch, which gathers one ahead.
        replicate: copies of the sharded model: groups of world size / ``replicate`` ranks share one (HSDP).
        cpu_offload: keep parameters, gradients and optimizer state in the host's memory between their uses.
        shard_placement: cut parameters into ``"rows"``, or ``"even"``: along the first dimension that divides by the
            number of ranks, which saves the padding of rows.
        shard_placement_fn: the placement of a parameter, as ``fully_shard`` takes it, instead.
        gather_in_compute_dtype: send parameters in the precision's compute dtype, half the bytes under bf16-mixed. Off,
            the layers that autocast leaves in float32 see parameters in float32, exactly as on one process.
        unused_parameters: some ranks may use parameters in an update that others don't. Needs torch 2.13.
        broadcast_buffers: give all ranks the buffers of rank 0 before each update.
        activation_checkpointing: keep only the inputs of each unit and compute its activations again in backward.
        compile_units: ``torch.compile`` the forward of each unit.
        meta: call ``configure_model`` on the meta device, so that no process ever holds the whole module.
    """

    joint_forward = True

    def __init__(
        self,
        unit_classes: list[str] | None = None,
        unit_size_mb: float = 25.0,
        reshard_after_forward: bool | int | None = None,
        prefetch: int = 0,
        replicate: int = 1,
        cpu_offload: bool = False,
        shard_placement: str = "rows",
        shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
        gather_in_compute_dtype: bool = False,
        unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        activation_checkpointing: bool = False,
        compile_units: bool = False,
        meta: bool = False,
    ) -> None:
        if shard_placement not in PLACEMENTS:
            raise ConfigurationError(
                f"fsdp: shard_placement={shard_placement!r} is unknown; allowed are {', '.join(PLACEMENTS)}."
            )
        limits = {"unit_size_mb": (unit_size_mb, 0), "prefetch": (prefetch, 0), "replicate": (replicate, 1)}
        for name, (value, least) in limits.items():
            if value < least:
                raise ConfigurationError(f"fsdp: {name}={value!r} must be at least {least}.")
        if unused_parameters and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ConfigurationError(f"fsdp: unused_parameters=True needs torch 2.13; this is {torch.__version__}.")
        self.unit_classes = unit_classes
        self.unit_size_mb = unit_size_mb
        self.reshard_after_forward = reshard_after_forward
        self.prefetch = prefetch
        self.replicate = replicate
        self.cpu_offload = cpu_offload
        self.shard_placement = shard_placement
        self.shard_placement_fn = shard_placement_fn
        self.gather_in_compute_dtype = gather_in_compute_dtype
        self.unused_parameters = unused_parameters
        self.broadcast_buffers = broadcast_buffers
        self.activation_checkpointing = activation_checkpointing
        self.compile_units = compile_units
        self.meta = meta
        self._sharded: list[FSDPModule] = []  # every unit and root, in the module's order
        self._changed: list[nn.Module] = []  # whose forward is ours
        self._replicated = False  # whether some parameters are
        self._hooks: list[RemovableHandle] = []
        self._watched: set[nn.Module] = set()  # units, where steps may be skipped
        self._ran: set[nn.Module] = set()  # of these, in the step that runs
        self._evaluation: nn.Module | None = None

    @property
    def offers(self) -> frozenset[str]:
        # a rank without gradient would leave the others' collectives hanging
        lacking = {"skip_samples", "whole_parameters", *(() if self.unused_parameters else ("unused_parameters",))}
        return (super().offers | {"fsdp_extensions"}) - lacking

    def notes(self, world_size: int, deterministic: bool) -> tuple[str, ...]:
        if world_size == 1:
            offload = "; cpu_offload has no effect" if self.cpu_offload else ""
            text = "fsdp with one process: nothing is sharded, it trains like single; --devices 2 (or more) shards"
            return (text + offload,)
        ranks = world_size // self.replicate
        copies = f", in {self.replicate} copies" if self.replicate > 1 else ""
        return (
            f"fsdp: each of {ranks} ranks holds 1/{ranks} of parameters, gradients and optimizer state{copies}; "
            + ("" if self.shard_placement == "even" else f"parameters are padded to a multiple of {ranks} rows; ")
            + "inner micro-batches of an accumulated update do not communicate and hold whole gradients meanwhile; "
            "manual optimization and on_skip reduce in every micro-batch",
        )

    def mesh_dims(self, world_size: int) -> dict[str, int]:
        if world_size == 1:
            return {"shard": 1}
        if world_size % self.replicate:
            raise ConfigurationError(f"fsdp: {world_size} processes are not replicate={self.replicate} equal groups")
        ranks, keep = world_size // self.replicate, self.reshard_after_forward
        if not isinstance(keep, bool) and keep is not None and (keep < 2 or ranks % keep):
            raise ConfigurationError(
                f"fsdp: reshard_after_forward={keep} must be a divisor, other than 1, of the {ranks} ranks that shard"
            )
        return {"shard": ranks} if self.replicate == 1 else {"dp": self.replicate, "shard": ranks}

    # ------------------------------------------------------------------------------------------------------ layout

    def shard(self, root: nn.Module, context: Context) -> nn.Module:
        self.context = context
        self._sharded, self._changed, self._evaluation, self._replicated = [], [], None, False
        user = root.get_submodule("module")
        chosen, self.laid_out = units.choose(user, self.unit_classes, self.unit_size_mb)
        if self.meta:
            materialize.check(user, context.restored)
        roots: list[nn.Module] = [root]
        # Replicated and averaged at the step: torch shards no scalars.
        apart = {param for param in user.parameters() if param.dim() == 0}
        if context.manual:
            # The step runs backward itself: a root around it would still be in its forward. So the submodules that the
            # step calls are roots, and what belongs to none of them is replicated too.
            roots, shared = units.callable_roots(user)
            apart |= shared
        inner = [unit for unit in chosen if unit not in roots]
        if context.world.world_size == 1:
            materialize.materialize_(user, context.device)
            for unit in chosen:
                self._change_forward(unit)
        else:
            names = [name for name, param in user.named_parameters(remove_duplicate=False) if param in apart]
            self._shard_all(user, inner, chosen, roots, names)
        self.trainable = {param for param in root.parameters() if param.requires_grad}
        return root

    def _shard_all(
        self, user: nn.Module, inner: list[nn.Module], chosen: list[nn.Module], roots: list[nn.Module],
        apart: list[str],
    ) -> None:  # fmt: skip
        context = self.context
        options, scratch = self._options(), materialize.Scratch(context.device)
        self._replicated = bool(apart)
        is_root = set(roots)
        order = {module: place for place, module in enumerate(user.modules())}
        # One after the other, inner ones first: with meta=True no more than one unit is ever whole.
        for module in [*sorted(inner, key=order.__getitem__, reverse=True), *roots]:
            whole = materialize.materialize_(module, context.device, scratch)
            self._broadcast(module.parameters())
            if module in chosen:
                self._change_forward(module)
            ignored = {user.get_parameter(name) for name in apart}  # anew, since materialising makes new ones
            keep = self.reshard_after_forward
            if context.manual and module in is_root and not keep:
                keep = True  # what a forward without backward leaves whole would be old after the next step
            made = fully_shard(module, reshard_after_forward=keep, ignored_params=ignored, **options)
            if self.unused_parameters:
                made.set_reduce_scatter_unused_params(True)
            self._sharded.append(made)
            for param in set(whole) & set(module.parameters()):
                param.data = param.data.clone()  # replicated: it has to leave the scratch memory
        materialize.materialize_(user, context.device)
        self._broadcast([*map(user.get_parameter, apart), *user.buffers()])
        if context.late and not context.manual:
            self._watched = set(inner)
            for unit in inner:
                self._hooks.append(unit.register_forward_hook(lambda unit, args, output: self._ran.add(unit)))
        self._sharded.sort(key=lambda module: order.get(module, -1))  # type: ignore[call-overload]
        if self.prefetch:
            units.prefetch_([unit for unit in self._sharded if id(unit) in map(id, chosen)], self.prefetch)

    def _options(self) -> dict[str, Any]:
        """What `fully_shard` is told of every unit."""
        context, policy = self.context, self.context.policy
        # Autocast, entered by the StepModule, casts for each operation as on one process: parameters are gathered as
        # they are stored, and norms and losses see them so. FSDP's own casting is for whole units, inputs included; it
        # only takes over what is sent. Gradients are reduced in the policy's dtype in either case.
        gather = policy.compute if self.gather_in_compute_dtype else None
        options: dict[str, Any] = {
            "mesh": context.mesh(),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=gather, reduce_dtype=policy.reduce, cast_forward_inputs=False
            ),
        }
        if self.shard_placement_fn is not None or self.shard_placement == "even":
            options["shard_placement_fn"] = self.shard_placement_fn or partial(
                units.even, ranks=context.mesh_dims["shard"]
            )
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=context.device.type != "cpu")
        return options

    def _change_forward(self, unit: nn.Module) -> None:
        """Compile the unit's forward, and let it keep only its inputs: on this object, inside of FSDP's hooks."""
        if not (self.compile_units or self.activation_checkpointing):
            return
        forward: Callable[..., Any] = unit.forward
        if self.compile_units:
            forward = torch.compile(forward)
        if self.activation_checkpointing:
            forward = partial(checkpoint, forward, use_reentrant=False)
        unit.forward = forward
        self._changed.append(unit)

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if sharded(tensor) is None:
                torch.distributed.broadcast(tensor.detach(), 0)  # all ranks

    def _reshard(self) -> None:
        for module in self._sharded:
            module.reshard()

    # ------------------------------------------------------------------------------------------------------ update

    def forward_backward(self, root: nn.Module, batches: Iterable[MicroBatch], scale: float | None) -> None:
        if self.broadcast_buffers and self._sharded:
            gradients.broadcast_together_(list(root.buffers()))
        super().forward_backward(root, batches, scale)

    def one_batch(self, root: nn.Module, micro: MicroBatch, scale: float | None) -> None:
        try:
            if not self.context.late or self.context.manual:
                super().one_batch(root, micro, scale)
                return
            self._ran.clear()
            micro.output = root("training_step", micro.batch, micro.index)
            loss = self.loss_of(micro, scale)
            if loss is None:
                self._check_all_ran(root, micro.index)
            # Skipping is declared. Backward is a collective, so all ranks agree before it; reading the answer waits.
            if self.agree_(torch.tensor(float(loss is None), device=self.context.device)).item():
                micro.output = None
                self._reshard()
            elif loss is not None:
                self.backward(root, loss)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise ConfigurationError(
                "a sharded parameter was used outside of its unit's forward, where only a part of it is on this rank. "
                f"Sharded as: {self.laid_out}. Call the modules that own parameters (not their weights or inner "
                "layers) in the step, or leave what is used in other ways out of blocks() or unit_classes."
            ) from error

    def _check_all_ran(self, root: nn.Module, index: int) -> None:
        """A forward is a collective, too: a step that returns None before it leaves the other ranks waiting."""
        missing = [n.removeprefix("module.") for n, m in root.named_modules() if m in self._watched - self._ran]
        if missing:
            raise TrivetError(
                f"training_step returned None on rank {self.context.world.rank} for batch {index} before it called "
                f"{', '.join(missing)}, which the other ranks call together with this one. Under fsdp return None only "
                "after the layers have run (for instance when the loss is not finite), or use --strategy ddp."
            )

    def wrap_optimizer(self, root: nn.Module, optimizer: Optimizer) -> None:
        if self._sharded:
            sharded_step.adapt(optimizer)

    def optimizer_step(self, root: nn.Module, optimizers: Sequence[Optimizer], **options: Any) -> StepResult:
        if self._replicated and not self.context.late:
            self.reduce_(gradients.parameters(optimizers))
        with sharded_step.refusals(optimizers):
            result = super().optimizer_step(root, optimizers, **options)
        if self.context.manual:
            self._reshard()  # a forward whose backward never came keeps parameters whole, which are old now
        return result

    def no_sync(self, root: nn.Module) -> AbstractContextManager[Any]:
        if self.context.late or not self._sharded:
            return nullcontext()  # see `one_batch` and `shard`: FSDP reduces in every backward
        return self._unreduced()

    @contextmanager
    def _unreduced(self) -> Iterator[None]:
        for module in self._sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in self._sharded:
                module.set_requires_gradient_sync(True, recurse=False)

    def reduce_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average those that are not sharded; FSDP has reduced the others in backward."""
        super().reduce_([param for param in parameters if sharded(param) is None])

    def agree_(self, flag: Tensor) -> Tensor:
        return super().agree_(flag.to(self.context.device))

    def evaluate(self, root: nn.Module) -> nn.Module:
        if not self._sharded:
            return root
        if self._evaluation is None:
            self._evaluation = Evaluation(root, self._reshard)
        return self._evaluation

    # ------------------------------------------------------------------------------------------- whole and in parts

    def storage_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if self.cpu_offload and self._sharded else device

    def whole(self, tensor: Tensor) -> Tensor:
        found = sharded(tensor)
        if found is None:
            return tensor
        if tensor.device != self.context.device:  # offloaded; the collective is the device's
            found = sharded(tensor.to(self.context.device)) or found
        return found.full_tensor()

    def to_optimizer(self, optimizer: Optimizer, param: nn.Parameter, key: str, value: Any) -> Any:
        if isinstance(value, Tensor) and sharded(value) is None and value.shape == param.shape:
            return self._part(value, param)
        return value

    def _part(self, value: Tensor, like: Tensor) -> Tensor:
        """A whole tensor, of which rank 0's counts, laid out like another. A collective where that is sharded."""
        found = sharded(like)
        if found is None:
            return value
        made = distribute_tensor(value.to(self.context.device), found.device_mesh, list(found.placements))
        return made.to(like.device)

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        targets = self.state_dict(module)
        parts = {k: self._part(v, targets[k]) if k in targets and sharded(v) is None else v for k, v in state.items()}
        super().load_state_dict(module, parts, strict=strict)

    @contextmanager
    def full_parameters(self, module: nn.Module, writeback: bool) -> Iterator[None]:
        self._reshard()
        replaced = units.make_whole(module, self.whole)
        try:
            yield
            if writeback:
                with torch.no_grad():
                    for owner, name, param in replaced:
                        param.copy_(self._part(getattr(owner, name).detach(), param))
        finally:
            for owner, name, param in replaced:
                setattr(owner, name, param)
        if writeback and self._sharded:
            self._broadcast([*module.parameters(), *module.buffers()])

    def release(self, root: nn.Module) -> None:
        self._reshard()
        units.make_whole(root, self.whole)
        self.teardown(root)

    def teardown(self, root: nn.Module) -> None:
        remove_fully_shard(root)
        for unit in self._changed:
            del unit.forward
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._watched, self._ran = [], set(), set()
        self._sharded, self._changed, self._evaluation = [], [], None


class Evaluation(nn.Module):
    """The StepModule in evaluation. What a forward leaves whole, waiting for a backward, is freed after it."""

    def __init__(self, root: nn.Module, reshard: Callable[[], None]) -> None:
        super().__init__()
        self.root, self.reshard = root, reshard

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        output = self.root(step, *args, **kwargs)
        self.reshard()
        return output
