"""ModelSummary: what a module is made of, as a table before training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import ConfigurationError
from .callback import Callback

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer


@dataclass(frozen=True)
class Layer:
    """One row: a submodule with everything inside it. ``bytes`` of its parameters, over all ranks once."""

    name: str
    type: str
    parameters: int
    trainable: int
    bytes: int
    training: bool


@dataclass(frozen=True)
class Summary:
    """The layers down to a depth, and the totals of the whole module. A tied parameter counts once in each total."""

    layers: list[Layer] = field(default_factory=list)
    total_parameters: int = 0
    trainable_parameters: int = 0
    bytes: int = 0

    @property
    def model_size(self) -> float:
        """Of all parameters, in MB."""
        return self.bytes / 1e6

    def __str__(self) -> str:
        head = ("", "Name", "Type", "Params", "Trainable", "Mode")
        rows = [head, *(_row(index, layer) for index, layer in enumerate(self.layers))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = [" | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0].rstrip(), rule, *(line.rstrip() for line in lines[1:]), rule, *self.totals()])

    def totals(self) -> list[str]:
        """The lines below the table."""
        frozen = self.total_parameters - self.trainable_parameters
        return [
            f"{human(self.trainable_parameters):>9} trainable parameters",
            f"{human(frozen):>9} frozen parameters",
            f"{human(self.total_parameters):>9} parameters in all, {self.model_size:.3f} MB",
        ]


class ModelSummary(Callback):
    """Prints a table of the module's layers, with the sizes of the whole layers also where they are sharded.

    On rank 0 at the start of `fit`, when everything is built and laid out.

    Args:
        max_depth: how deep to go into layers of layers; 0 for the totals alone, -1 for everything.

    Attributes:
        summary: the newest `Summary`, in every process that trained.
    """

    def __init__(self, max_depth: int = 1) -> None:
        if type(max_depth) is not int or max_depth < -1:
            raise ConfigurationError(f"{type(self).__name__}(max_depth={max_depth!r}): expected -1, 0 or more.")
        self.max_depth = max_depth
        self.summary: Summary | None = None
        self._before: dict[str, int] = {}

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        # A strategy may leave an empty parameter behind where it keeps the parts itself.
        self._before = {name: param.numel() for name, param in module.named_parameters()}

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        self.summary = summarize(module, self.max_depth, self._before)
        if trainer.is_global_zero:
            self.show(self.summary)

    def show(self, summary: Summary) -> None:
        """Print it."""
        print(summary, flush=True)


class RichModelSummary(ModelSummary):
    """The same table, drawn by rich."""

    def show(self, summary: Summary) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(header_style="bold")
        for name in ("", "Name", "Type", "Params", "Trainable", "Mode"):
            table.add_column(name, justify="right" if name in ("Params", "Trainable") else "left")
        for index, layer in enumerate(summary.layers):
            table.add_row(*_row(index, layer))
        console = Console()
        if summary.layers:
            console.print(table)
        for line in summary.totals():
            console.print(line, highlight=False, markup=False)


def summarize(module: nn.Module, max_depth: int = 1, sizes: Mapping[str, int] | None = None) -> Summary:
    """Count the parameters of a module and of its layers. Reads shapes only, so the meta device will do.

    ``sizes`` are elements by parameter name, for parameters that are empty now.
    """
    known = sizes or {}
    names = {id(param): name for name, param in module.named_parameters()}

    def count(part: nn.Module) -> tuple[int, int, int]:
        total = trainable = size = 0
        for param in part.parameters():
            elements = math.prod(param.shape) or known.get(names[id(param)], 0)
            total += elements
            trainable += elements if param.requires_grad else 0
            size += elements * param.element_size()
        return total, trainable, size

    layers = [
        Layer(name, type(part).__name__, *count(part), part.training)
        for name, part in module.named_modules()
        if name and (max_depth == -1 or name.count(".") < max_depth)
    ]
    return Summary(layers, *count(module))


def human(number: int) -> str:
    """``1234567`` as ``1.2 M``."""
    power = 0 if number < 1000 else min((len(str(number)) - 1) // 3, 4)
    return str(number) if power == 0 else f"{number / 1000**power:,.1f} {' KMBT'[power]}"


def _row(index: int, layer: Layer) -> tuple[Any, ...]:
    mode = "train" if layer.training else "eval"
    return str(index), layer.name, layer.type, human(layer.parameters), human(layer.trainable), mode
