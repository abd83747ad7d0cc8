"""LightningCLI: Lightning's arguments and methods, over Trivet's own commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse import Namespace

from ... import trainer as trivet
from ...callbacks.callback import Callback
from ...commands import entry
from ...commands.job import Job
from ...commands.script import Script
from ...configured import read_optimizers
from ...errors import ConfigurationError
from . import spelling
from .arguments import LightningArgumentParser
from .trainer import Trainer

if TYPE_CHECKING:
    from ...data.datamodule import DataModule
    from ...module import Module

# Methods of Lightning's that nobody would call here, and what there is to override instead.
NOT_CALLED = {
    **dict.fromkeys(
        ("add_core_arguments_to_parser", "add_default_arguments_to_parser", "init_parser", "setup_parser"),
        "Override add_arguments_to_parser, and give parser_kwargs.",
    ),
    **dict.fromkeys(("_add_subcommands", "_prepare_subcommand_parser", "subcommands"), "The commands are fixed."),
    "parse_arguments": "Give args=..., or override before_instantiate_classes.",
    "instantiate_classes": "Override instantiate_trainer or after_instantiate_classes.",
    "_instantiate_trainer": "Override instantiate_trainer.",
    "_run_subcommand": "Override fit, before_fit, after_fit and their like.",
    "link_optimizers_and_lr_schedulers": "Override configure_optimizers.",
    "_add_configure_optimizers_method_to_model": "Override configure_optimizers.",
}
RUNS = ("fit", "validate", "test", "predict")
CHOOSES = {"strategy": spelling.strategy, "precision": spelling.precision}


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Torch's, with the metric that it watches."""

    def __init__(self, optimizer: torch.optim.Optimizer, monitor: str, *args: Any, **options: Any) -> None:
        super().__init__(optimizer, *args, **options)
        self.monitor = monitor


class SaveConfigCallback(Callback):
    """Override `save_config` to store the configuration somewhere else too; in the run's directory it is anyway."""

    def __init__(self, parser: LightningArgumentParser, config: Mapping[str, Any], **options: Any) -> None:
        self.config, self.text = config, parser.dump()
        self.parser = self  # `parser.dump(config)` is what is asked of it

    def dump(self, config: Any = None, **options: Any) -> str:
        """The configuration as YAML."""
        return self.text

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """On rank 0, when a run is set up."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if trainer.is_global_zero:
            self.save_config(trainer, module, stage)


class LightningCLI:
    """A script's command line, as `trivet.cli` gives it, with Lightning's arguments.

    Override `add_arguments_to_parser`, ``before_fit``, ``after_fit`` and their like, `before_instantiate_classes`,
    `after_instantiate_classes`, `instantiate_trainer` and `configure_optimizers`; or define ``fit``, ``validate``,
    ``test`` or ``predict``, which then run in place of the trainer's. Attributes: ``trainer, model, datamodule, config,
    subcommand, parser``.
    """

    def __init__(
        self,
        model_class: type[Module] | Callable[..., Module] | None = None,
        datamodule_class: type[DataModule] | Callable[..., DataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: Callable[..., Any] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: Sequence[str] | Mapping[str, Any] | None = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        if subclass_mode_model != subclass_mode_data and model_class is not None and datamodule_class is not None:
            one, other = ("model", "data") if subclass_mode_model else ("data", "model")
            raise ConfigurationError(
                f"LightningCLI(subclass_mode_{one}=True) without subclass_mode_{other}: both are chosen on the command "
                f"line, or none. Set both, and name the class of {other} in a default: "
                f'parser.set_defaults({{"{other}.class_path": ...}}).'
            )
        for name, instead in NOT_CALLED.items():
            if hasattr(type(self), name):
                raise ConfigurationError(
                    f"{type(self).__name__} defines {name}, which Trivet's LightningCLI would never call. {instead}"
                )
        self._trainer_class, self._arguments = trainer_class, dict[str, Any]()
        self.save_config_callback, self.save_config_kwargs = save_config_callback, save_config_kwargs or {}
        self.parser = parser_class()
        self.add_arguments_to_parser(self.parser)
        words, given = _given(args, run)
        self.subcommand = words.pop(0) if run and words and not words[0].startswith("-") else None
        command = self.subcommand or "fit"
        files = _default_files(dict(parser_kwargs or {}), command)
        seed: int | None = seed_everything_default
        if isinstance(seed, bool):  # Lightning's seed that is asked for without a number is 0, too
            seed = 0 if seed else None
        script = Script(
            model_class, datamodule_class, subclass_mode_model or subclass_mode_data,
            trainer_class=trainer_class,
            trainer_defaults={**(trainer_defaults or {})},
            defaults=_merged({"seed": seed}, self.parser.defaults, given),
            links=self.parser.links,
            extend=self.parser.extend,
            save_config=save_config_callback is not None,
            on_ready=partial(self._ready, command),
            spellings=CHOOSES,
            make_trainer=self._make_trainer,
            methods={name: getattr(self, name) for name in RUNS if hasattr(self, name)},
        )  # fmt: skip
        self.before_instantiate_classes()
        argv = [*files, *words]
        prog = f"python {os.path.basename(sys.argv[0])}"
        if self.subcommand is None and not run:
            Job(command, argv, prog=prog, script=script)
            return
        code, _ = entry.run([self.subcommand, *argv] if self.subcommand else argv, prog=prog, script=script)
        if code:
            raise SystemExit(code)
        getattr(self, f"after_{command}", _nothing)()

    # ------------------------------------------------------------------------------------------------- to override

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add arguments, links and defaults."""

    def before_instantiate_classes(self) -> None: ...

    def after_instantiate_classes(self) -> None: ...

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Make the trainer of the command line's arguments, and of those that are given here."""
        return self._trainer_class(**{**self._arguments, **kwargs})

    @staticmethod
    def configure_optimizers(lightning_module: Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        """What the module's ``configure_optimizers`` returns where the command line chose an optimizer."""
        raise NotImplementedError("configure_optimizers is only called where it is overridden")

    # ------------------------------------------------------------------------------------------------------ inside

    def _make_trainer(self, arguments: dict[str, Any]) -> Any:
        self._arguments = arguments
        made = self.instantiate_trainer()
        if not isinstance(made, trivet.Trainer):
            raise ConfigurationError(f"{type(self).__name__}.instantiate_trainer() returned {made!r}, and no Trainer.")
        return made

    def _ready(self, command: str, job: Job) -> None:
        self.trainer, self.model, self.datamodule = job.trainer, job.model, job.data
        values = self.parser.nested(job)
        config = {"subcommand": command, command: values} if self.subcommand else values
        self.config = _namespace(config)
        self.trainer.callbacks.extend(self.parser.callbacks(job))
        saver = self.save_config_callback
        if saver not in (None, SaveConfigCallback) and not self.trainer.fast_dev_run:
            self.parser.text = job.config_text()
            self.trainer.callbacks.append(saver(self.parser, values, **self.save_config_kwargs))
        chosen = job.values.get("optimizer") is not None
        if type(self).configure_optimizers is not LightningCLI.configure_optimizers and chosen:
            made: Any = self.model
            made.configure_optimizers = partial(_configure, made, made.configure_optimizers, self.configure_optimizers)
        self.after_instantiate_classes()
        if self.subcommand is not None:
            getattr(self, f"before_{command}", _nothing)()


def _configure(module: Module, chosen: Callable[[], Any], own: Callable[..., Any]) -> Any:
    optimizers, schedules = read_optimizers(chosen(), module)
    return own(module, optimizers[0], *(schedule.scheduler for schedule in schedules))


def _namespace(value: Any) -> Any:
    """Mappings as what can be read by attributes, too."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key.isidentifier() for key in value):
        return value
    return Namespace(**{key: _namespace(one) for key, one in value.items()})  # type: ignore[no-untyped-call]


def _nothing() -> None: ...


def _given(args: Any, run: bool) -> tuple[list[str], dict[str, Any]]:
    """The words of the command line, the command first, and what was given as a mapping instead."""
    if isinstance(args, Mapping) or hasattr(args, "as_dict"):  # a dict, or jsonargparse's Namespace
        given = dict(args if isinstance(args, Mapping) else args.as_dict())
        command = given.pop("subcommand", None) or next((name for name in given if name in entry.COMMANDS), None)
        given = dict(given.get(command, given)) if command else given
        return ([str(command)] if run and command else []), given
    words = list(sys.argv[1:] if args is None else args)
    at = next((n for n, word in enumerate(words) if word in entry.COMMANDS and not _is_value(words, n)), None)
    return (words if at is None or not run else [words[at], *words[:at], *words[at + 1 :]]), {}


def _is_value(words: Sequence[str], number: int) -> bool:
    before = words[number - 1] if number else ""
    return before.startswith("-") and "=" not in before and before not in ("--print_config", "-h", "--help")


def _default_files(given: dict[str, Any], command: str) -> list[str]:
    """``parser_kwargs``: of it there are the files that are read first."""
    own = {**{name: value for name, value in given.items() if name not in entry.COMMANDS}, **given.get(command, {})}
    files = own.pop("default_config_files", [])
    own.pop("description", None)
    if own.get("default_env"):
        raise ConfigurationError(
            "parser_kwargs={'default_env': True}: variables such as TRIVET_FIT__MODEL__LR are always read."
        )
    unknown = sorted(own.keys() - {"parser_mode", "error_handler", "exit_on_error", "default_env"})
    if unknown or own.get("parser_mode", "yaml") != "yaml":
        raise ConfigurationError(
            f"parser_kwargs={given!r}: 'default_config_files' is what there is, here or for one command. Links take "
            "the place of a parser_mode with interpolation."
        )
    return [word for path in files if os.path.exists(path) for word in ("--config", os.fspath(path))]


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = found.get(key)
            found[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found
