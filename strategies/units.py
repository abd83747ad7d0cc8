"""Which submodules are sharding units: gathered, computed and freed as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from trivet.errors import ConfigurationError
from trivet.layout import sharded

MIB = 2**20


def has_forward(module: nn.Module) -> bool:
    """Whether calling the module means something; lists and dictionaries of modules are only looked into."""
    return type(module).forward is not nn.Module.forward


def choose(module: nn.Module, classes: Sequence[str] | None, size_mb: float) -> tuple[list[nn.Module], str]:
    """The units of the user's module, in its order, and a sentence that says which they are and why.

    What the module's own method ``blocks()`` returns; else the outermost submodules of the named ``classes``; else
    submodules that hold at least ``size_mb`` MiB of parameters which no unit inside them holds. The rest of the module
    is a unit of its own. A submodule that shares a parameter with something outside of it is part of the rest.
    """
    declared = getattr(type(module), "blocks", None)
    names = {sub: name for name, sub in module.named_modules()}
    if callable(declared):
        wanted, why = _declared(module, declared, names), f"{type(module).__name__}.blocks()"
    elif classes:
        wanted, why = _of_classes(module, classes), f"unit_classes={list(classes)!r}"
    else:
        wanted, why = _of_size(module, size_mb * MIB), f"unit_size_mb={size_mb:g}"
    tied = [unit for unit in wanted if _shares(module, unit)]
    units = [unit for unit in wanted if unit not in tied and any(True for _ in unit.parameters())]
    text = f"{len(units)} sharding units by {why}{_listed(names[unit] for unit in units)}, and the rest of the module"
    if tied:
        text += f"; part of the rest, since they share parameters with other parts{_listed(names[t] for t in tied)}"
    return sorted(units, key=list(names).index), text


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    shown = found if len(found) <= 6 else [*found[:3], "...", *found[-2:]]
    return f": {', '.join(shown)}" if found else ""


def _declared(
    module: nn.Module, blocks: Callable[..., Iterable[nn.Module]], names: dict[nn.Module, str]
) -> list[nn.Module]:
    found = list(dict.fromkeys(blocks(module)))
    for unit in found:
        if unit not in names or unit is module:
            raise ConfigurationError(
                f"{type(module).__name__}.blocks() returned {type(unit).__name__}, which is not a submodule of it."
            )
        if not has_forward(unit):
            raise ConfigurationError(
                f"{type(module).__name__}.blocks() returned {names[unit]!r}, a {type(unit).__name__} that has no "
                "forward, so its parameters would be reached past the unit. Return the modules inside of it that are "
                "called."
            )
    return found


def _of_classes(module: nn.Module, classes: Sequence[str]) -> list[nn.Module]:
    found: list[nn.Module] = []

    def walk(parent: nn.Module) -> None:
        for child in parent.children():
            if type(child).__name__ in classes and has_forward(child):
                found.append(child)
            else:
                walk(child)

    walk(module)
    missing = sorted(set(classes) - {type(unit).__name__ for unit in found})
    if missing:
        present = sorted({type(sub).__name__ for sub in module.modules() if sub is not module})
        raise ConfigurationError(f"unit_classes names {missing}, and the module holds only {', '.join(present)}.")
    return list(dict.fromkeys(found))


def _of_size(module: nn.Module, least: float) -> list[nn.Module]:
    found: list[nn.Module] = []

    def walk(parent: nn.Module) -> float:
        """Bytes of the parameters in ``parent`` that no unit holds."""
        size: float = sum(p.numel() * p.element_size() for p in parent.parameters(recurse=False))
        size += sum(walk(child) for child in parent.children())
        if size >= least and has_forward(parent) and parent is not module:
            found.append(parent)
            return 0
        return size

    walk(module)
    return list(dict.fromkeys(found))


def _shares(module: nn.Module, unit: nn.Module) -> bool:
    inside = {id(param) for param in unit.parameters()}
    members = {id(sub) for sub in unit.modules()}
    return any(
        id(param) in inside
        for sub in module.modules()
        if id(sub) not in members
        for param in sub.parameters(recurse=False)
    )


def callable_roots(module: nn.Module) -> tuple[list[nn.Module], set[nn.Parameter]]:
    """The topmost submodules that are called, and the parameters that belong to none of them or to several."""
    roots: list[nn.Module] = []
    apart: set[nn.Parameter] = set()

    def walk(parent: nn.Module) -> None:
        apart.update(parent.parameters(recurse=False))
        for child in parent.children():
            if not has_forward(child):
                walk(child)
            elif child not in roots:
                roots.append(child)

    walk(module)
    seen: set[nn.Parameter] = set()
    for root in roots:
        mine = set(root.parameters())
        apart |= seen & mine
        seen |= mine
    return [root for root in roots if set(root.parameters()) - apart], apart


def prefetch_(units: Sequence[FSDPModule], count: int) -> None:
    """Let each unit gather so many of the units that come after it, in forward and in backward."""
    for place, module in enumerate(units):
        module.set_modules_to_forward_prefetch(list(units[place + 1 : place + 1 + count]))
        module.set_modules_to_backward_prefetch(list(units[max(0, place - count) : place][::-1]))


def even(param: nn.Parameter, ranks: int) -> Shard:
    """The first dimension that divides by the number of ranks; rows, padded, where none does."""
    return Shard(next((dim for dim, size in enumerate(param.shape) if size % ranks == 0), 0))


def make_whole(module: nn.Module, whole: Callable[[Tensor], Tensor]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Exchange sharded parameters for whole ones; returns where which one was. Ties are kept. All ranks call it."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    replaced = []
    for owner in module.modules():
        for name, param in list(owner.named_parameters(recurse=False)):
            if sharded(param) is not None:
                if param not in made:
                    made[param] = nn.Parameter(whole(param.detach()), param.requires_grad)
                setattr(owner, name, made[param])
                replaced.append((owner, name, param))
    return replaced
