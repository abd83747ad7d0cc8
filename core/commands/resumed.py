"""A command that goes on from a checkpoint with another option, as with ``--model.lr``, trains with that option.

A checkpoint holds the options of optimizers and the fields of schedulers as they were when it was written. Beside them
it holds, for this, those that they were made with. What they are made with now and were not then, the user has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..callbacks.callback import Callback
from ..errors import ConfigurationError
from .slots import path_of

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer


class KeepChanges(Callback):
    """Puts options that have changed since the checkpoint back, when the checkpoint has been restored.

    Refuses a checkpoint of other optimizers or schedulers. ``chosen`` are the classes that the command line names, by
    slot.
    """

    def __init__(self, chosen: Mapping[str, str]) -> None:
        self.chosen = dict(chosen)
        self._then: dict[str, Any] | None = None
        self._now: dict[str, Any] | None = None
        self._trainer: Trainer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None}

    def state_dict(self) -> dict[str, Any]:
        return {"made": self._now, "chosen": self.chosen} if self._now else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called before optimizers and schedulers are restored."""
        self._then = state.get("made")
        if self._trainer is not None:
            self._now = made_with(self._trainer)
            if self._then is not None:
                refuse_others(self._then, self._now, state.get("chosen", {}), self.chosen)

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._trainer = trainer if stage == "fit" else None
        self._then = self._now = None

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._trainer = None

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        if self._now is None:  # nothing was restored
            self._now = made_with(trainer)
        elif self._then is not None:
            changed = put_back(trainer, self._then, self._now)
            if changed and trainer.is_global_zero:
                print(f"trivet: changed since the checkpoint: {', '.join(changed)}", file=sys.stderr, flush=True)


def made_with(trainer: Trainer) -> dict[str, Any]:
    """The plain options of each group of each optimizer, and the plain fields of each scheduler."""
    return {
        "optimizers": [[_plain(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers],
        "schedulers": [_plain(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "classes": {
            "optimizer": [path_of(type(optimizer)) for optimizer in trainer.optimizers],
            "lr_scheduler": [path_of(type(config.scheduler)) for config in trainer.lr_scheduler_configs],
        },
    }


def refuse_others(
    then: Mapping[str, Any], now: Mapping[str, Any], chosen_then: Mapping[str, str], chosen: Mapping[str, str]
) -> None:
    """Raise ConfigurationError where optimizers or schedulers are of other classes than the checkpoint's."""
    for slot, classes in now["classes"].items():
        old = then.get("classes", {}).get(slot, classes)
        if old == classes:
            continue
        if slot in chosen_then:
            remedy = f"Give --{slot} {chosen_then[slot]} as then; config.yaml of that run has its options."
        elif slot in chosen:
            remedy = f"It was the model's own: leave out --{slot}."
        else:
            remedy = "The model's configure_optimizers() returned others then: let it return the same."
        name = slot.replace("lr_", "")
        raise ConfigurationError(
            f"the checkpoint was written with {' and '.join(old) or f'no {name}'}, and here there is "
            f"{' and '.join(classes) or f'no {name}'}. {remedy}"
        )


def put_back(trainer: Trainer, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Set what differs between ``then`` and ``now``; say what."""
    said: dict[str, None] = {}
    for optimizer, old_groups, new_groups in zip(
        trainer.optimizers, then["optimizers"], now["optimizers"], strict=False
    ):
        for group, old, new in zip(optimizer.param_groups, old_groups, new_groups, strict=False):
            changed = _changed(old, new)
            if "initial_lr" in changed:  # the schedule has got somewhere on its way from there
                changed["lr"] = group["lr"] * new["initial_lr"] / old["initial_lr"] if old["initial_lr"] else new["lr"]
            for key, value in changed.items():
                group[key] = value
                if key != "initial_lr":
                    said[f"{key}={value:g}" if isinstance(value, float) else f"{key}={value!r}"] = None
    for config, old, new in zip(trainer.lr_scheduler_configs, then["schedulers"], now["schedulers"], strict=False):
        changed = _changed(old, new)
        config.scheduler.load_state_dict({**config.scheduler.state_dict(), **changed})
        said |= {f"{key}={value!r}": None for key, value in changed.items() if key != "base_lrs"}
    return list(said)


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in new.items() if key in old and old[key] != value}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in values.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if key != "params" and key[0] != "_" and all(isinstance(one, (bool, int, float, str)) for one in items):
            kept[key] = list(value) if isinstance(value, tuple) else value
    return kept
