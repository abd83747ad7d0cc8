"""Which linear layers of a module a precision replaces, and what it says of those that it leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches

from torch import nn
from trivet.errors import ConfigurationError
from trivet.torch_compat import has_hooks

Unfit = Callable[[nn.Linear, bool], str]  # (layer, whether its weight is shared) -> why it is left alone, or nothing


class Choice:
    """The linear layers of a module: ``taken``, with their names, and ``alone``, names by the reason.

    Left alone are layers of which ``skip`` has a name, or that of a module that holds them, for which ``unfit`` has a
    reason, whose class is a subclass of somebody's, since what it does besides would be lost, and those with hooks.
    Layers that were replaced before are taken again, as the options may have changed: ``again`` says which classes
    those are.
    """

    def __init__(
        self, module: nn.Module, skip: Sequence[str], unfit: Unfit, again: Sequence[str] = ("Float8Linear",)
    ) -> None:
        skip = (skip,) if isinstance(skip, str) else skip
        named: dict[nn.Module, list[str]] = {}  # a shared one has several names
        for name, sub in module.named_modules(remove_duplicate=False):
            named.setdefault(sub, []).append(name)
        known = [name for names in named.values() for name in names if name]
        if unknown := [name for name in skip if name not in known]:
            near = get_close_matches(unknown[0], known, 1)
            raise ConfigurationError(
                f"skip names {', '.join(map(repr, unknown))}, and the model has no such module. "
                + (f"Did you mean {near[0]!r}?" if near else "Names are those of named_modules(), such as 'net.head'.")
            )
        self.taken: dict[nn.Module, str] = {}
        self.alone: dict[str, list[str]] = {}
        owners: dict[int, int] = {}
        for sub in named:
            for param in sub.parameters(recurse=False):
                owners[id(param)] = owners.get(id(param), 0) + 1
        for layer, names in named.items():
            if not isinstance(layer, nn.Linear):
                continue
            reason = unfit(layer, owners[id(layer.weight)] > 1)
            replaced = type(layer).__name__ in again
            if any(f"{name}.".startswith(f"{one}.") for name in names for one in skip):
                reason = "skipped by name"
            elif type(layer) is not nn.Linear and not replaced:
                reason = f"of the class {type(layer).__name__}"
            elif not replaced and has_hooks(layer):
                reason = "with hooks"
            if reason:
                self.alone.setdefault(reason, []).append(names[0])
            else:
                self.taken[layer] = names[0]


def told(choice: Choice, how: str, otherwise: str) -> str:
    """A sentence: which layers ``how`` is true of, and why which ones are left in ``otherwise``."""
    count = len(choice.taken) + sum(map(len, choice.alone.values()))
    text = f"{len(choice.taken)} of {count} linear layers {how}{_listed(list(choice.taken.values()))}"
    left = [f"{_listed(names, ' ')} ({reason})" for reason, names in choice.alone.items()]
    return text + (f"; left in {otherwise}:{','.join(left)}" if left else "")


def _listed(names: Sequence[str], head: str = ": ") -> str:
    shown = names if len(names) <= 8 else [*names[:4], f"... {len(names) - 7} more ...", *names[-3:]]
    return head + ", ".join(shown) if names else ""
