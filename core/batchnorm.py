"""Batch statistics of all processes together, on any device with a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Sum(torch.autograd.Function):
    """The sum over ranks; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)  # all ranks: each of them runs this layer
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient)  # all ranks
        return gradient


class SyncBatchNorm(_BatchNorm):
    """What ``torch.nn.SyncBatchNorm`` does, on devices that it does not run on. Without a group it is a BatchNorm."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}.")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        count = x.new_tensor([x.numel() / x.size(1)])
        total = _Sum.apply(torch.cat([x.sum(axes), x.square().sum(axes), count]))  # type: ignore[no-untyped-call]
        mean, square = (total[:-1] / total[-1]).chunk(2)
        variance = square - mean.square()
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                assert self.num_batches_tracked is not None
                self.num_batches_tracked += 1
                share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                unbiased = variance * (total[-1] / (total[-1] - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        y = (x - mean.view(shape)) * (variance.view(shape) + self.eps).rsqrt()
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        out: Tensor = y.to(input.dtype)
        return out


def synchronise(module: nn.Module, device_type: str) -> nn.Module:
    """Exchange the batch norms in a module for ones that see the batches of all ranks; parameters stay the same."""
    if device_type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-any-return, no-untyped-call]
    if isinstance(module, _BatchNorm):
        new = SyncBatchNorm(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        new.train(module.training)
        for name, parameter in module.named_parameters(recurse=False):
            new.register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            new.register_buffer(name, buffer)
        return new
    for name, child in module.named_children():
        setattr(module, name, synchronise(child, device_type))
    return module
