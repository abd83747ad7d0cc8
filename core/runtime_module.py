"""RuntimeModule: what `Runtime.setup` returns in place of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .engine import Engine
from .errors import ConfigurationError


class RuntimeModule(nn.Module):
    """A module laid out by a strategy. Calling it runs the user's forward in the precision's context."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = (engine,)  # in a tuple, so that nn.Module does not register what is inside
        self._inside = False
        self.called = False  # since the last step
        self.calls = 0
        # The StepModule does not call the user's module, but its forward: who calls it is past strategy and precision.
        self.guard = engine.module.register_forward_pre_hook(lambda module, args: self._refuse_past(module))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine[0]
        self.calls += 1
        if not torch.is_grad_enabled():
            return engine.strategy.evaluate(engine.root)("forward", *args, **kwargs)
        self.called = self._inside = True
        try:
            return engine.root("forward", *args, **kwargs)
        finally:
            self._inside = False

    def _refuse_past(self, module: nn.Module) -> None:
        if module is self.module and torch.is_grad_enabled() and not self._inside:  # and not a copy of it
            raise self.past(f"{type(module).__name__} was called")

    def past(self, what: str) -> ConfigurationError:
        """What to raise where a forward went past this module."""
        return ConfigurationError(
            f"{what} past the module that runtime.setup returned, so that strategy and precision knew nothing of it. "
            "Call what it returns, `model, optimizer = runtime.setup(model, optimizer)`; methods and layers of your "
            "module are called in its forward."
        )

    def train(self, mode: bool = True) -> RuntimeModule:
        self._engine[0].module.train(mode)
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self._engine[0].module.parameters(recurse)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """By the user's names."""
        return self._engine[0].strategy.state_dict(self._engine[0].module)

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self._engine[0].module
