"""What is checked of an accelerator beside training: tasks of one worker, so that no context is made elsewhere."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import registry
from . import reference, subject
from .reference import Recipe
from .subject import Cell

Pair = namedtuple("Pair", ["left", "right"])


def facts(spec: Any) -> None:
    """Device type, backend, count and devices fit together, as does what is offered of them."""
    plugin = registry.make("accelerator", spec).plugin
    assert isinstance(plugin.device_type, str), f"device_type is {plugin.device_type!r}, expected text"
    backend, collectives = plugin.collective_backend, "collectives" in plugin.offers
    assert backend is None or isinstance(backend, str), f"collective_backend is {backend!r}, expected text or None"
    assert backend is not None or not collectives, "it offers 'collectives', and collective_backend is None"
    assert plugin.is_available() is True, f"is_available() is {plugin.is_available()!r}"
    count = plugin.device_count()
    assert isinstance(count, int), f"device_count() is {count!r}, expected a number"
    assert count >= 1, f"device_count() is {count!r} although it is available"
    devices = [plugin.device(local_rank) for local_rank in range(count if "device_ids" in plugin.offers else 1)]
    for local_rank, device in enumerate(devices):
        assert isinstance(device, torch.device), f"device({local_rank}) is {device!r}, expected a torch.device"
        assert device.type == plugin.device_type, f"device({local_rank}) is {device}, device_type {plugin.device_type}"
    assert len(set(devices)) == len(devices), f"several of its devices are the same: {devices}"


def moving(spec: Any) -> None:
    """`to_device` moves every tensor in a batch, whatever the nesting, and changes nothing else."""
    plugin = registry.make("accelerator", spec).plugin
    device = plugin.device(0)
    plugin.setup(device)
    try:
        batch = {
            "x": torch.arange(6.0).reshape(2, 3), "list": [torch.tensor([1, 2]), ("text", None, 3)],
            "pair": Pair(torch.tensor(True), 0.5), "half": torch.ones(2, dtype=torch.bfloat16),
        }  # fmt: skip
        moved = plugin.to_device(batch, device)
        _kept(moved, batch, device, "the batch")
        if not plugin.moves_batches:
            assert device.type == "cpu", "moves_batches is False, and batches are made on the CPU"
    finally:
        plugin.teardown()


def _kept(moved: Any, given: Any, device: torch.device, where: str) -> None:
    if isinstance(given, Tensor):
        assert isinstance(moved, Tensor), f"to_device makes {type(moved).__name__} of a tensor in {where}"
        assert moved.device == device or moved.device.type == device.type == "cpu", (
            f"to_device leaves a tensor in {where} on {moved.device}, the device is {device}"
        )
        assert moved.dtype == given.dtype, f"to_device makes {moved.dtype} of {given.dtype} in {where}"
        assert torch.equal(moved.cpu(), given), f"to_device changes the values of a tensor in {where}"
        return
    assert type(moved) is type(given), f"to_device makes {type(moved).__name__} of {type(given).__name__} in {where}"
    if isinstance(given, Mapping):
        assert list(moved) == list(given), f"to_device changes the keys of {where}"
        for key in given:
            _kept(moved[key], given[key], device, f"{where}[{key!r}]")
    elif isinstance(given, (list, tuple)):
        assert len(moved) == len(given), f"to_device changes the length of {where}"
        for index, pair in enumerate(zip(moved, given, strict=True)):
            _kept(*pair, device, f"{where}[{index}]")
    else:
        assert moved == given, f"to_device makes {moved!r} of {given!r} in {where}"


def dtypes(spec: Any) -> None:
    """Each dtype that is offered can be computed in: products, sums and gradients; each autocast gives its dtype."""
    plugin = registry.make("accelerator", spec).plugin
    device = plugin.device(0)
    plugin.setup(device)
    try:
        for name in sorted(offer for offer in plugin.offers if offer.startswith(("dtype:", "autocast:"))):
            what, _, dtype = name.partition(":")
            try:
                _compute(what, getattr(torch, dtype), device)
            except Exception as error:
                raise AssertionError(f"it offers {name!r} and cannot do it: {type(error).__name__}: {error}") from error
    finally:
        plugin.teardown()


def _compute(what: str, dtype: torch.dtype, device: torch.device) -> None:
    exact = torch.arange(12.0).reshape(3, 4) / 8
    stored = dtype if what == "dtype" else torch.float32
    left, right = (t.to(device, stored).requires_grad_() for t in (exact, exact.T.contiguous()))
    with torch.autocast(device.type, dtype) if what == "autocast" else nullcontext():
        product = left @ right
    product.float().sum().backward()  # type: ignore[no-untyped-call]
    assert product.dtype == dtype, f"a product is {product.dtype}"
    assert left.grad is not None, "backward gives no gradient"
    assert left.grad.dtype == stored, f"the gradient is {left.grad.dtype}"
    torch.testing.assert_close(product.detach().cpu().float(), exact @ exact.T, rtol=1e-2, atol=1e-2)


def numbers(spec: Any) -> None:
    """`memory` gives whole numbers and `stats` floats, by name; `synchronize` and `step_boundary` give nothing."""
    plugin = registry.make("accelerator", spec).plugin
    device = plugin.device(0)
    plugin.setup(device)
    try:
        torch.ones(1000, device=device)
        for what, kind in (("memory", int), ("stats", float)):
            found = getattr(plugin, what)()
            assert isinstance(found, dict), f"{what}() is {found!r}, expected a mapping"
            odd = {k: v for k, v in found.items() if not isinstance(k, str) or type(v) is not kind}
            assert not odd, f"{what}() has {odd!r}, expected {kind.__name__} by name"
        assert plugin.synchronize() is None, "synchronize() returns something"
        assert plugin.step_boundary() is None, "step_boundary() returns something"
    finally:
        plugin.teardown()


def seeding(spec: Any) -> None:
    """The same seed makes the device's random numbers the same again. The CPU's are the core's, which seeds them."""
    plugin = registry.make("accelerator", spec).plugin
    device = plugin.device(0)
    plugin.setup(device)
    try:
        drawn = []
        for seed in (5, 5, 6):
            if device.type == "cpu":
                torch.manual_seed(seed)
            plugin.seed(seed)
            drawn.append(torch.rand(8, device=device).cpu())
        assert torch.equal(drawn[0], drawn[1]), "seed(5) twice gives different random numbers on its device"
        assert not torch.equal(drawn[0], drawn[2]), "seed(5) and seed(6) give the same random numbers on its device"
    finally:
        plugin.teardown()


class Watched(subject.Subject):
    """Records where batches and parameters are, and may fail in its first step."""

    def __init__(self, recipe: Recipe, fails: bool) -> None:
        super().__init__(recipe)
        self.fails, self.devices = fails, set[torch.device]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.devices |= {tensor.device for tensor in (*batch, *self.parameters())}
        if self.fails:
            raise InterruptedError("on purpose")
        return super().training_step(batch, batch_idx)


def life(spec: Any) -> None:
    """A run is set up once, on the device that was named, moves each batch, and ends once, also after a failure."""
    for fails in (False, True):
        selected = registry.make("accelerator", spec)
        calls: list[str] = []
        for name in ("device", "setup", "to_device", "teardown"):
            setattr(selected.plugin, name, _recording(calls, name, getattr(selected.plugin, name)))
        recipe, module = Recipe(epochs=1), Watched(Recipe(epochs=1), fails)
        try:
            Cell("single", "fp32", 1, selected).trainer(recipe).fit(module, subject.loader(recipe))
        except InterruptedError:
            assert fails
        wanted = registry.make("accelerator", spec).plugin.device(0)
        plain = wanted.index is None or wanted.type == "cpu"  # compared by type; "cpu:0" is "cpu"
        where = {device.type if plain else str(device) for device in module.devices}
        expected = wanted.type if plain else str(wanted)
        assert where == {expected}, f"tensors of the run are on {sorted(where)}, device(0) is {wanted}"
        order = [call for call in calls if call in ("setup", "teardown")]
        assert order == ["setup", "teardown"], f"a run called {order}"
        batches = len(list(reference.global_batches(recipe, 1))) if not fails else 1
        if selected.plugin.moves_batches:
            moved = calls.count("to_device")
            assert moved >= batches, f"to_device was called {moved} times for {batches} batches"


def _recording(calls: list[str], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(*args: Any) -> Any:
        calls.append(name)
        return method(*args)

    return recorded


DEVICE = {task.__name__: task for task in (facts, moving, dtypes, numbers, seeding, life)}
