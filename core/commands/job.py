"""``fit``, ``validate`` and ``plan``: from a command line to a Trainer and what it is asked to do."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, PlanError, TrivetError
from ..launch import environments
from .explain import as_data, explain
from .selection import PLUGINS, Selection, select

if TYPE_CHECKING:
    from ..data.datamodule import DataModule
    from ..module import Module
    from ..trainer import Trainer


def run_job(
    command: str,
    argv: Sequence[str],
    *,
    prog: str,
    classes: tuple[type[Module] | None, type[DataModule] | None] = (None, None),
    defaults: Mapping[str, Any] | None = None,
) -> tuple[int, Trainer | None]:
    """Run ``fit``, ``validate`` or ``plan``; return the exit code and the trainer."""
    if command == "plan":
        return show_plan(argv, prog=prog, classes=classes, defaults=defaults), None
    job = Job(command, argv, prog=prog, classes=classes, defaults=defaults)
    if command == "fit":
        job.fit()
    else:
        job.validate()
    return 0, job.trainer


def show_plan(argv: Sequence[str], **arguments: Any) -> int:
    """Print the plan, or why there is none; with ``--explain`` in either case also who wants what and who offers it."""
    as_json, explained = "--json" in argv, "--explain" in argv
    more: dict[str, Any] = {}
    try:
        job = Job("plan", argv, **arguments)
        resolved = job.trainer.resolve(job.model, environments.detect())
        if explained:
            more = {"capabilities": as_data(resolved.combination)}
        if as_json:
            print(json.dumps({**resolved.plan.to_dict(), **more}, indent=2))
        else:
            print(f"{resolved.plan}\n\n{explain(resolved.combination)}" if explained else resolved.plan)
    except TrivetError as error:
        combination = error.combination if explained and isinstance(error, PlanError) else None
        if not as_json:
            if combination is not None:
                print(explain(combination), end="\n\n", flush=True)
            raise
        if combination is not None:
            more = {"capabilities": as_data(combination)}
        if isinstance(error, PlanError):
            print(json.dumps({"conflicts": [asdict(conflict) for conflict in error.conflicts], **more}, indent=2))
        else:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}, indent=2))
        return 2
    return 0


class Job:
    """What one command line describes, made: the trainer, the model, the data, and the values behind them."""

    def __init__(
        self,
        command: str,
        argv: Sequence[str],
        *,
        prog: str,
        classes: tuple[type[Module] | None, type[DataModule] | None],
        defaults: Mapping[str, Any] | None,
    ) -> None:
        # all of these import torch or jsonargparse
        import trivet

        from .parser import build_parser, parse

        trainer_class: Callable[..., Trainer] = trivet.Trainer
        selection = select(argv, {"model": classes[0], "data": classes[1]}, _plugins_only(defaults))
        parser = build_parser(command, selection, trainer_class, prog=prog, defaults=defaults)
        values = parse(parser, selection)
        if command != "plan" and "model" not in selection.targets:
            raise ConfigurationError("no model is selected. Add --model package.module.Class, or name it in --config.")
        if values.get("seed") is not None:
            trivet.seed_everything(values.seed)
        live = parser.instantiate(values)
        arguments = {name: live[name] for name in inspect.signature(trainer_class).parameters if name in live}
        arguments |= {key: _spec(key, vars(live[key])) for key in PLUGINS}
        config: dict[str, Any] = json.loads(parser.dump(values, format="json"))
        self.ckpt_path: str | None = live.get("ckpt_path")
        with warnings.catch_warnings():
            if command != "fit":  # nothing is trained, so how long does not matter
                warnings.filterwarnings("ignore", message="neither max_epochs")
            self.trainer = trainer_class(**arguments)
        self.trainer.config = config
        self.model: Module | None = _make("model", selection, live)
        self.data: DataModule | None = _make("data", selection, live)

    def fit(self) -> None:
        assert self.model is not None
        self.trainer.fit(self.model, datamodule=self.data, ckpt_path=self.ckpt_path)
        if self.trainer.is_global_zero:
            print(fit_summary(self.trainer), flush=True)

    def validate(self) -> None:
        assert self.model is not None
        results = self.trainer.validate(self.model, datamodule=self.data, ckpt_path=self.ckpt_path)
        if self.trainer.is_global_zero:
            for metrics in results:
                print(f"validate: {metrics_text(metrics) or 'nothing was logged'}", flush=True)


def _plugins_only(defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    """A script's defaults for plugins select them; its other defaults are the parser's."""
    return {key: value for key, value in (defaults or {}).items() if key in PLUGINS}


def _spec(key: str, options: Mapping[str, Any]) -> Any:
    """What the Trainer takes for a plugin: its name, or a mapping of name (or import path) and options."""
    name = options["name"]
    rest = {option: value for option, value in options.items() if option != "name"}
    if "." in str(name):
        return {"class_path": name, "init_args": rest}
    return {"name": name, **rest} if rest else name


def _make(key: str, selection: Selection, live: Any) -> Any:
    if key not in selection.targets:
        return None
    options = vars(live[key]) if key in live else {}
    return selection.targets[key](**{name: value for name, value in options.items() if name != "class_path"})


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
