"""What a command leaves: a line on the terminal, the configuration beside the run, and predictions in files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import rundir
from ..callbacks.callback import Callback
from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer

CONFIG = "config.yaml"
FILES = (".bin", ".ckpt", ".csv", ".h5", ".json", ".npy", ".npz", ".parquet", ".pickle", ".pkl", ".pth", ".txt")


class SaveConfig(Callback):
    """Writes the whole configuration of a command into the directory of its run, before anything else is there.

    A run that goes on in the directory of another finds a file there: it writes ``config-2.yaml``. One that goes on
    with itself writes only what has changed.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run and (trainer.loggers or trainer.enable_checkpointing):
            path = Path(trainer.log_dir) / CONFIG
            known = path.parent.glob(f"{path.stem}*{path.suffix}") if trainer.continues else ()
            if not any(one.read_text(encoding="utf-8") == self.text for one in known):
                with rundir.written(path.parent):
                    write_new(path, self.text)


def write_new(path: Path, text: str) -> Path:
    """Write a file that is not there yet: ``name.yaml``, else ``name-2.yaml`` and so on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        free = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        try:
            with free.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            number += 1
        else:
            return free


# --------------------------------------------------------------------------------------------------------- predictions


def check_output(given: str) -> tuple[Path, bool]:
    """The path for predictions, and whether it is a directory. Raises ConfigurationError before it is needed."""
    path = Path(given)
    streams = path.suffix != ".pt" or given.endswith("/") or path.is_dir()
    if streams and (path.is_file() or path.suffix in FILES):
        what = "is a file" if path.is_file() else "ends like a file"
        raise ConfigurationError(f"--output {given!r} {what}. Name one that ends in .pt, or a directory.")
    if (above := next((folder for folder in path.parents if folder.exists()), None)) and not above.is_dir():
        raise ConfigurationError(f"--output {given!r}: {str(above)!r} is a file, and no directory.")
    return path, streams


def clear_output(path: Path) -> None:
    """Make room for predictions: those of an earlier command in this directory must not be read among the new ones."""
    for old in path.glob("[0-9][0-9][0-9]-*.pt"):
        old.unlink()


def write_predictions(predictions: Any, path: Path) -> None:
    """Write what `Trainer.predict` returned; a reader sees the old file or the new one."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    torch.save(predictions, temporary)
    temporary.replace(path)


def prediction_summary(predictions: Sequence[Any]) -> str:
    """``12 batches of tensor (32, 10) float32``: how many there are, and of what."""
    counts = Counter(_shape(one) for one in _batches(predictions))
    total = sum(counts.values())
    noun = "batch" if total == 1 else "batches"
    shapes = [f"{shape}" if len(counts) == 1 else f"{count} of {shape}" for shape, count in counts.most_common(3)]
    more = ", ..." if len(counts) > 3 else ""
    return f"{total} {noun}{': ' if shapes else ''}{', '.join(shapes)}{more}"


def _batches(predictions: Sequence[Any]) -> Iterator[Any]:
    for one in predictions:
        if isinstance(one, list):  # of several loaders
            yield from one
        else:
            yield one


def _shape(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None:
        return f"{type(value).__name__} {tuple(shape)} {str(dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_shape(one)}' for key, one in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shape, value))})"
    return type(value).__name__


# -------------------------------------------------------------------------------------------------------------- numbers


def fit_summary(trainer: Trainer) -> str:
    """The line that ``fit`` always ends with."""
    progress = trainer.progress
    parts = [f"{progress.epoch} epochs", f"{progress.update} updates"]
    if metrics := metrics_text(trainer.callback_metrics):
        parts.append(metrics)
    text = f"fit: {', '.join(parts)}"
    checkpoint = trainer.checkpoint_callback
    path = (checkpoint.best_model_path or checkpoint.last_model_path) if checkpoint is not None else None
    return f"{text}; checkpoint: {path}" if path else text


def metrics_text(metrics: Mapping[str, float]) -> str:
    """``val/acc 0.9806, val/loss 0.0704``."""
    return ", ".join(f"{name} {float(value):.4g}" for name, value in sorted(metrics.items()))
