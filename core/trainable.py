"""Which parameters of a module require gradients, and whether that is still so, seen without a walk over them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_, methodcaller
from weakref import ref

from torch import nn

from .torch_compat import registries

_REQUIRES_GRAD, _VALUES = attrgetter("requires_grad"), methodcaller("values")


class Trainable(set[nn.Parameter]):
    """The parameters of a module that require gradients, with what `still` compares.

    A walk over ``module.parameters()`` takes 0.5 to 0.9 us a tensor, which is done at each update; `still` takes a
    tenth of it, in loops of C. It compares objects, so that it sees layers and parameters that were put in, taken out
    or exchanged, in any way but one: a dict that is itself replaced (``module._parameters = {...}``) goes unseen.
    """

    def __init__(self, module: nn.Module, root: nn.Module) -> None:
        parameters = list(module.parameters())
        super().__init__(param for param in parameters if param.requires_grad)
        self._root, self._parameters = ref(root), parameters  # who keeps this must not keep a wrapper
        self._flags = list(map(_REQUIRES_GRAD, parameters))
        tables = registries(module)
        self._views = [table.values() for table in tables if isinstance(table, dict)]  # live
        self._scripted = [table for table in tables if not isinstance(table, dict)]  # of a `torch.jit.ScriptModule`
        self._registered = list(chain.from_iterable(chain(self._views, map(_VALUES, self._scripted))))

    def still(self, root: nn.Module) -> bool:
        """Whether nothing was frozen, unfrozen, added or taken out since, of what is in the same root."""
        if root is not self._root() or list(map(_REQUIRES_GRAD, self._parameters)) != self._flags:
            return False
        now: list[object] = list(chain.from_iterable(chain(self._views, map(_VALUES, self._scripted))))
        return len(now) == len(self._registered) and all(map(is_, now, self._registered))

    def __reduce__(self) -> tuple[type[set[nn.Parameter]], tuple[list[nn.Parameter]]]:
        return set, (list(self),)  # a copy is of other parameters or another process: nothing to compare with


def trainable(root: nn.Module, before: set[nn.Parameter] | None, unwrap: Callable[[nn.Module], nn.Module]) -> Trainable:
    """The parameters that require gradients of the module in ``root``: ``before`` itself where it says so and nothing
    changed."""
    if isinstance(before, Trainable) and before.still(root):
        return before
    return Trainable(unwrap(root), root)
