"""LightningModule: Trivet's Module, with what Lightning's has beside it."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from ...errors import CheckpointError, ConfigurationError
from ...module import Module

if TYPE_CHECKING:
    from typing import Self


# What code reaches for at Lightning's module.
GONE = {
    "fabric": "For a loop of your own use trivet.Runtime.",
    "device_mesh": "There is no tensor parallelism; strategy='fsdp' shards the module as it is.",
    "to_tensorrt": "Export with to_onnx or torch.export, and convert that.",
    "tbptt_split_batch": "Split the sequence in training_step, with automatic_optimization = False.",
}


class LightningModule(Module):
    """What a user implements; see `trivet.Module`."""

    # what torch.jit.script shall leave alone
    __jit_unused_properties__ = (
        *("trainer", "device", "dtype", "current_epoch", "global_step", "global_rank", "local_rank"),
        *("logger", "loggers", "hparams", "hparams_initial", "on_gpu"),
    )

    # torch.jit.script would read those of Module, which are strings, and takes the first that are not empty
    __annotations__ = {"automatic_optimization": bool}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("training_step", "validation_step", "test_step", "predict_step"):
            if name in vars(cls) and "dataloader_iter" in inspect.signature(vars(cls)[name]).parameters:
                raise ConfigurationError(
                    f"{cls.__name__}.{name}(dataloader_iter) wants the loader's iterator. A step gets one batch; give "
                    "fit a loader whose batches hold what a step needs."
                )

    def __getattr__(self, name: str) -> Any:
        if name in GONE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}. {GONE[name]}")
        return super().__getattr__(name)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def hparams_initial(self) -> Any:
        """`hparams`; changes to those are not kept apart."""
        return self.hparams

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **overrides: Any,
    ) -> Self:
        """A module with the weights of a checkpoint, which may also be a file of Lightning's."""
        if hparams_file is not None:
            raise ConfigurationError(
                "load_from_checkpoint(hparams_file=...): hyperparameters are in the checkpoint. Pass others by name."
            )
        strict = strict is not False
        if Path(checkpoint_path).is_file():
            return cls._from_lightning(checkpoint_path, map_location, strict, overrides)
        return super().load_from_checkpoint(checkpoint_path, map_location, strict, **overrides)

    @classmethod
    def _from_lightning(cls, path: str | Path, map_location: Any, strict: bool, overrides: dict[str, Any]) -> Self:
        stored = torch.load(path, map_location=map_location or "cpu", weights_only=True)
        if not isinstance(stored, dict) or "state_dict" not in stored:
            raise CheckpointError(f"{str(path)!r} is no checkpoint of Lightning's: it has no 'state_dict'.")
        parameters = inspect.signature(cls).parameters
        all_of_them = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        hparams = {
            name: value
            for name, value in dict(stored.get("hyper_parameters", {})).items()
            if name in parameters or (all_of_them and not name.startswith("_"))
        }
        module = cls(**{**hparams, **overrides})
        module.configure_model()
        module.on_load_checkpoint(stored)
        module.load_state_dict(stored["state_dict"], strict=strict)
        return module if map_location is None else module.to(map_location)

    def _example(self, given: Any, what: str) -> Any:
        found = self.example_input_array if given is None else given
        if found is None:
            raise ConfigurationError(f"{what} needs an input. Give it, or set example_input_array.")
        return found

    @torch.no_grad()
    def to_onnx(self, file_path: str | Path | None = None, input_sample: Any = None, **options: Any) -> Any:
        """`torch.onnx.export` of the module, called with ``input_sample`` or `example_input_array`."""
        sample = self._example(input_sample, "to_onnx")
        sample = sample if isinstance(sample, tuple) else (sample,)
        return torch.onnx.export(self, sample, None if file_path is None else str(file_path), **options)

    @torch.no_grad()
    def to_torchscript(
        self, file_path: str | Path | None = None, method: str = "script", example_inputs: Any = None, **options: Any
    ) -> Any:
        """The module in evaluation mode as TorchScript, by ``"script"`` or by ``"trace"``."""
        if method not in ("script", "trace"):
            raise ConfigurationError(f"to_torchscript(method={method!r}): allowed are 'script' and 'trace'.")
        training, held = self.training, self._trainer
        self._trainer = held or cast("Any", SimpleNamespace())  # scripting looks at every property, also `trainer`
        self.eval()
        try:
            jit: Any = torch.jit
            if method == "script":
                made = jit.script(self, **options)
            else:
                made = jit.trace(self, self._example(example_inputs, "to_torchscript"), **options)
        finally:
            self.train(training)
            self._trainer = held
        if file_path is not None:
            jit.save(made, str(file_path))
        return made
