"""Which optimizers train a slice of a parameter as they train the whole."""

from __future__ import annotations

import torch
from torch.optim import Optimizer
from trivet.errors import ConfigurationError

# torch's optimizers that update each element from that element's gradient and state alone: a slice of a parameter
# trains as the whole does. Each is tested against ddp.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
# what they keep once per parameter and not per element
PER_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})


def check(optimizer: Optimizer, *, promised: bool) -> None:
    """Refuse an optimizer that is not known, nor promised, to be elementwise, and one that has stepped already."""
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE and not promised:
        raise ConfigurationError(
            f"zero cuts parameters into flat slices, and {name} is not known to treat each element by itself. "
            f"Known are {', '.join(known.__name__ for known in ELEMENTWISE)}; Muon, Adafactor and LBFGS look at "
            "whole tensors and cannot work. Use --strategy ddp, or give elementwise=True "
            "(--strategy.elementwise true) if the optimizer is elementwise."
        )
    steps = [state.get("step", 1) for state in optimizer.state.values()]
    if any(float(step) > 0 for step in steps):  # Adagrad has its first state from the beginning
        raise ConfigurationError(
            f"{name} has state already: it has stepped before zero could share it. Build a new optimizer, or "
            "resume from a checkpoint."
        )
