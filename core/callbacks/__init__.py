"""What can be attached to a run. The names below are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accumulation import GradientAccumulationScheduler as GradientAccumulationScheduler
    from .averaging import EMAWeightAveraging as EMAWeightAveraging
    from .averaging import WeightAveraging as WeightAveraging
    from .callback import Callback as Callback
    from .checkpoint import Checkpoint as Checkpoint
    from .device_stats import DeviceStatsMonitor as DeviceStatsMonitor
    from .early_stopping import EarlyStopping as EarlyStopping
    from .finetuning import BackboneFinetuning as BackboneFinetuning
    from .finetuning import BaseFinetuning as BaseFinetuning
    from .lambda_callback import LambdaCallback as LambdaCallback
    from .learning_rate import LearningRateMonitor as LearningRateMonitor
    from .model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from .on_exception import OnExceptionCheckpoint as OnExceptionCheckpoint
    from .prediction_writer import PredictionWriter as PredictionWriter
    from .progress import ProgressBar as ProgressBar
    from .progress_bars import RichProgressBar as RichProgressBar
    from .progress_bars import TQDMProgressBar as TQDMProgressBar
    from .summary import ModelSummary as ModelSummary
    from .summary import RichModelSummary as RichModelSummary
    from .swa import StochasticWeightAveraging as StochasticWeightAveraging
    from .throughput import ThroughputMonitor as ThroughputMonitor
    from .timer import Timer as Timer

_PUBLIC = {
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "Callback": "callback",
    "Checkpoint": "checkpoint",
    "DeviceStatsMonitor": "device_stats",
    "EMAWeightAveraging": "averaging",
    "EarlyStopping": "early_stopping",
    "GradientAccumulationScheduler": "accumulation",
    "LambdaCallback": "lambda_callback",
    "LearningRateMonitor": "learning_rate",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "summary",
    "OnExceptionCheckpoint": "on_exception",
    "PredictionWriter": "prediction_writer",
    "ProgressBar": "progress",
    "RichModelSummary": "summary",
    "RichProgressBar": "progress_bars",
    "StochasticWeightAveraging": "swa",
    "TQDMProgressBar": "progress_bars",
    "ThroughputMonitor": "throughput",
    "Timer": "timer",
    "WeightAveraging": "averaging",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'trivet.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
