"""Scalar: a metric as Lightning's code expects it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Scalar(float):
    """A number that can be asked like the 0-dim tensor that Lightning has in its place: ``.item()``, ``.cpu()``, ..."""

    def item(self) -> float:
        return float(self)

    tolist = item

    def tensor(self) -> Tensor:
        return torch.tensor(float(self))

    def detach(self, *args: Any, **options: Any) -> Scalar:
        return self

    cpu = cuda = clone = to = float = double = squeeze = detach

    def numpy(self) -> Any:
        return self.tensor().numpy()


def scalars(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: Scalar(value) for name, value in metrics.items()}
