"""``fit validate test predict plan``: from a command line to a Trainer and what it is asked to do."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, PlanError, TrivetError
from ..launch import environments
from . import outcome
from .explain import as_data, explain
from .script import Script
from .selection import Selection, select
from .slots import Slot, path_of, slots

if TYPE_CHECKING:
    from ..data.datamodule import DataModule
    from ..module import Module
    from ..trainer import Trainer


def run_job(command: str, argv: Sequence[str], *, prog: str, script: Script) -> tuple[int, Trainer | None]:
    """Run a command; return the exit code and the trainer."""
    if command == "plan":
        return show_plan(argv, prog=prog, script=script), None
    job = Job(command, argv, prog=prog, script=script)
    getattr(job, command)()
    return 0, job.trainer


def show_plan(argv: Sequence[str], *, prog: str, script: Script) -> int:
    """Print the plan, or why there is none; with ``--explain`` in either case also who wants what and who offers it."""
    as_json, explained = "--json" in argv, "--explain" in argv
    more: dict[str, Any] = {}
    try:
        job = Job("plan", argv, prog=prog, script=script)
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
    """What one command line describes, made.

    ``values`` are the parsed values, ``config`` all of them as plain data by key; ``trainer``, ``model`` and ``data``
    are the objects. Raises SystemExit where the command line only asks for its help or its configuration.
    """

    def __init__(self, command: str, argv: Sequence[str], *, prog: str, script: Script) -> None:
        # all of these import torch or jsonargparse
        import trivet

        from .links import Filling, declared
        from .parser import build_parser, known_keys, parse

        self.command, self.script = command, script
        self.trainer_class: Callable[..., Trainer] = script.trainer_class or trivet.Trainer
        own = script.slots(slots(self.trainer_class))
        self.selection = select(command, argv, script, own, os.environ)
        links = declared(script, self.selection)
        linked = [link.target for link in links]
        self._parser = build_parser(command, self.selection, script, self.trainer_class, prog=prog, targets=linked)
        if not {"--help", "-h"}.isdisjoint(self.selection.bare):
            print(self._parser.format_help(), end="")
            raise SystemExit(0)
        take_hparams(self.selection)
        if "model" not in self.selection.targets:  # only a plan goes without, and needs nothing that it would be given
            links = [link for link in links if not link.target.startswith("model.")]
        self._filling = Filling(links, self.selection, known_keys(self._parser))
        self.values: Any = parse(self._parser, self.selection, linked)
        self._filling.static(self.values)
        text = self._parser.dump(self.values, format="json", skip_validation=True, skip_unset=False)
        self.config: dict[str, Any] = json.loads(text)
        for name in ("config", "print_config", "explain", "json"):
            self.config.pop(name, None)
        self._answer()
        if command != "plan" and "model" not in self.selection.targets:
            raise ConfigurationError("no model is selected. Add --model package.module.Class, or name it in --config.")
        if self.values.get("seed") is not None:
            trivet.seed_everything(self.values.seed)
        self._make()
        if script.on_ready is not None:
            script.on_ready(self)

    def _answer(self) -> None:
        """Answer what the command line asks of itself, and end."""
        bare = self.selection.bare
        if "--explain" in bare and (bare["--explain"] or self.command != "plan"):
            from .provenance import explain_values

            defaults = flat(self._parser.get_defaults(skip_validation=True).as_dict())
            own = self.script.trainer_defaults
            print(explain_values(bare["--explain"], flat(self.config), defaults, self.selection, self._filling, own))
            raise SystemExit(0)
        if "--print_config" in bare:
            print(self.config_text(), end="")
            raise SystemExit(0)

    # --------------------------------------------------------------------------------------------------------- making

    def _make(self) -> None:
        made: dict[str, Any] = {}
        order = self._filling.order(self.values)
        for key in order:
            if self._filling.waits(key, self.values):
                made[key] = self._one(key)
                again = lambda key=key: self._one(key)  # noqa: E731
                self._filling.of(key, made[key], again, stage_of(self.command), self.values)
        for target in self._filling.filled:
            _store(self.config, target, self.values[target])
        self.trainer = self._make_trainer()
        for key in order:
            if key not in made:
                made[key] = self._one(key)
        self.model: Module | None = made["model"]
        self.data: DataModule | None = made["data"]
        if self.model is not None:
            from .optimizers import replace_optimizers

            replace_optimizers(self.model, self._part("optimizer"), self._part("lr_scheduler"))

    def live(self, key: str) -> dict[str, Any]:
        """The options of what fills a slot, classes in them made."""
        if self.values.get(key) is None:
            return {}
        options = vars(self._parser.instantiate(_only(self.values, [key]))[key])
        slot = self.selection.slots[key.partition(".")[0]]
        return {
            name: value
            for name, value in options.items()
            if name != slot.selector and not (value is None and name in slot.filled)
        }

    def _one(self, key: str) -> Any:
        target = self.selection.targets.get(key)
        return None if target is None else target(**self.live(key))

    def _part(self, key: str) -> Any:
        from .optimizers import Part

        target = self.selection.targets.get(key)
        return None if target is None else Part(target, self.live(key))

    def _make_trainer(self) -> Trainer:
        own = self.selection.slots
        plugins = [slot for slot in own.values() if slot.kind]
        names = [name for name in inspect.signature(self.trainer_class).parameters if name not in own]
        arguments = vars(self._parser.instantiate(_only(self.values, names)))
        for slot in plugins:
            arguments[slot.key] = self._plugins(slot)
        with warnings.catch_warnings():
            if self.command != "fit":  # nothing is trained, so how long does not matter
                warnings.filterwarnings("ignore", message="neither max_epochs")
            make = self.script.make_trainer
            trainer = self.trainer_class(**arguments) if make is None else make(arguments)
        trainer.config = written(self.config, self.selection)
        if self.command == "fit":
            from .resumed import KeepChanges

            targets = self.selection.targets
            chosen: dict[str, str] = {
                slot: path_of(targets[slot]) for slot in ("optimizer", "lr_scheduler") if slot in targets
            }
            trainer.callbacks.insert(0, KeepChanges(chosen))
        if self.script.save_config and self.command != "plan":
            trainer.callbacks.insert(0, outcome.SaveConfig(self.config_text()))
        return trainer

    def _plugins(self, slot: Slot) -> Any:
        """What the Trainer takes for a slot: a name, or a mapping of name (or import path) and options, or several."""
        objects = self.script.objects(slot)
        keys = self.selection.keys_of(slot)
        if slot.several:
            found = [{"class_path": self.values[key][slot.selector], "init_args": self.live(key)} for key in keys]
            held = self.selection.settings.values.get(slot.key)
            none = False if slot.kind == "logger" else None  # of an empty list
            return [*objects, *found] if objects or keys else none if held == {} else held
        name, options = self.values[slot.key][slot.selector], self.live(slot.key)
        if objects and slot.key not in self.selection.settings.values:
            return objects[0]
        if "." in str(name) and ":" not in str(name):
            return {"class_path": name, "init_args": options}
        return {"name": name, **options} if options else name

    def config_text(self) -> str:
        """Every value as a file that ``--config`` reads."""
        import yaml  # type: ignore[import-untyped]

        text: str = yaml.safe_dump(written(self.config, self.selection), sort_keys=False, allow_unicode=True)
        return text

    # -------------------------------------------------------------------------------------------------------- commands

    def fit(self) -> None:
        self._run()
        self._say(outcome.fit_summary(self.trainer))

    def validate(self) -> None:
        for metrics in self._run() or ():
            self._say(f"{self.command}: {outcome.metrics_text(metrics) or 'nothing was logged'}")

    test = validate

    def _run(self, **more: Any) -> Any:
        """Call the Trainer's method of the command's name, or the script's own."""
        more["ckpt_path"] = self.values.get("ckpt_path")
        own = self.script.methods.get(self.command)
        if own is None:
            return getattr(self.trainer, self.command)(self.model, datamodule=self.data, **more)
        return own(model=self.model, **({} if self.data is None else {"datamodule": self.data}), **more)

    def predict(self) -> None:
        from ..callbacks.prediction_writer import PredictionWriter

        given = self.values.get("output")
        output, streams = (None, False) if given is None else outcome.check_output(given)
        if output is not None and streams:
            if self.trainer.is_global_zero:
                outcome.clear_output(output)
            self.trainer.callbacks.append(PredictionWriter(output_dir=output))
        writers = [callback for callback in self.trainer.callbacks if isinstance(callback, PredictionWriter)]
        keeps = not writers or (output is not None and not streams)
        found = self._run(return_predictions=keeps)
        where = ", ".join(str(writer.output_dir) for writer in writers if writer.output_dir is not None)
        if keeps and found is None:  # a script's own method kept them
            return
        self._say(
            self._kept(found, output) if keeps else f"predict: written {f'to {where}' if where else 'by callbacks'}"
        )

    def _kept(self, predictions: Any, output: Path | None) -> str:
        if not self.trainer.is_global_zero:
            return ""
        path = output or Path(self.trainer.log_dir) / "predictions.pt"
        outcome.write_predictions(predictions, path)
        return f"predict: {outcome.prediction_summary(predictions)}; written to {path}"

    def _say(self, text: str) -> None:
        if self.trainer.is_global_zero:
            print(text, flush=True)


def stage_of(command: str) -> str:
    """What `DataModule.setup` is told."""
    return "fit" if command == "plan" else command


def take_hparams(selection: Selection) -> None:
    """With ``--ckpt_hparams``, let the checkpoint's hyperparameters be the model's arguments, above files."""

    def given(key: str) -> Any:
        flags = [flag.value for flag in selection.flags if flag.key == key]
        return flags[-1] if flags else selection.settings.values.get(key)

    if str(given("ckpt_hparams")).lower() != "true":
        return
    path, target = given("ckpt_path"), selection.targets.get("model")
    if path is None or target is None:
        raise ConfigurationError("--ckpt_hparams true needs --ckpt_path PATH, and a model.")
    from ..checkpoint import directory, references

    taken = inspect.signature(target).parameters
    found = {name: value for name, value in directory.read_user(path)["hparams"].items() if name in taken}
    for name, value in found.items():
        if references.is_reference(value):
            references.resolved(target, name, value)
            found[name] = str(value[references.KEY]).replace(":", ".")
        elif not given(f"model.{name}"):
            references.refuse_importing(target, name, value)
    selection.settings.merge({"model": found}, f"the checkpoint {path}")


# ------------------------------------------------------------------------------------------------------- configuration


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def written(config: Mapping[str, Any], selection: Selection) -> dict[str, Any]:
    """The configuration in the form of a file: lists for several, a bare name where there are no options."""
    found = dict(config)
    for key, slot in selection.slots.items():
        value = found.get(key)
        if slot.several and isinstance(value, dict):
            found[key] = list(_entries(value))
        elif isinstance(value, dict) and set(value) == {slot.selector}:
            found[key] = value[slot.selector]
    return found


def _entries(held: Mapping[str, Any]) -> Iterator[Any]:
    for entry in held.values():
        options = {name: value for name, value in entry.items() if name != "class_path"}
        yield {"class_path": entry["class_path"], "init_args": options} if options else entry["class_path"]


def _only(values: Any, names: Sequence[str]) -> Any:
    from jsonargparse import Namespace

    found: Any = Namespace()  # type: ignore[no-untyped-call]
    for name in names:
        if name in values:
            value = values[name]
            found[name] = value.clone() if isinstance(value, Namespace) else value
    return found


def _store(config: dict[str, Any], key: str, value: Any) -> None:
    """Put a link's value into the configuration; what is not plain data by its text."""
    *heads, last = key.split(".")
    for head in heads:
        config = config.setdefault(head, {})
    try:
        config[last] = json.loads(json.dumps(value))
    except (TypeError, ValueError):
        config[last] = repr(value)
