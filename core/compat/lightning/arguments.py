"""LightningArgumentParser: notes what a LightningCLI adds, for Trivet's own parser."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...callbacks.callback import Callback
from ...commands.links import Link
from ...commands.slots import path_of
from ...errors import ConfigurationError

if TYPE_CHECKING:
    import jsonargparse

    from ...commands.job import Job


class LightningArgumentParser:
    """What `LightningCLI.add_arguments_to_parser` is given."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.defaults: dict[str, Any] = {}
        self.classes: dict[str, type[Any]] = {}
        self.arguments: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        self.others: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.text = ""

    # ---------------------------------------------------------------------------------------------------- to call

    def link_arguments(
        self,
        source: str | tuple[str, ...],
        target: str,
        compute_fn: Callable[..., Any] | None = None,
        apply_on: str = "parse",
    ) -> None:
        """Take a value from another: of an argument (``"parse"``) or an attribute (``"instantiate"``)."""
        if apply_on not in ("parse", "instantiate"):
            raise ConfigurationError(f"link_arguments(apply_on={apply_on!r}): allowed are 'parse' and 'instantiate'.")
        sources = (source,) if isinstance(source, str) else tuple(source)
        self.links.append(Link(sources, target, compute_fn, "parse" if apply_on == "parse" else "instantiate"))

    def set_defaults(self, *given: Mapping[str, Any], **defaults: Any) -> None:
        """Set defaults by dotted keys; configuration files and flags are above them."""
        for layer in (*given, defaults):
            self.defaults.update(layer)

    def add_argument(self, *names: str, **options: Any) -> None:
        """Add a flag, which ``cli.config`` then has."""
        self.arguments.append((names, options))

    def add_subclass_arguments(self, baseclass: type[Any], nested_key: str, **options: Any) -> None:
        """Add a key that chooses a class below ``baseclass``, with its arguments."""
        self.others.append(("add_subclass_arguments", (baseclass, nested_key), options))

    def add_function_arguments(self, function: Callable[..., Any], nested_key: str, **options: Any) -> None:
        """Add the arguments of a function under a key."""
        self.others.append(("add_function_arguments", (function, nested_key), options))

    def __getattr__(self, name: str) -> Any:
        own = [name for name in dir(type(self)) if name.startswith(("add_", "link_", "set_"))]
        raise AttributeError(f"Trivet's LightningArgumentParser has no {name!r}. There are {', '.join(own)}.")

    def add_class_arguments(self, theclass: type[Any], nested_key: str, **options: Any) -> None:
        """Add the arguments of a class under a key, which ``cli.config`` then has."""
        self.classes[nested_key] = theclass

    def add_lightning_class_args(self, lightning_class: type[Any], nested_key: str, **options: Any) -> None:
        """Add the arguments of a callback's class under a key; one is made of them and attached to the Trainer."""
        if not (isinstance(lightning_class, type) and issubclass(lightning_class, Callback)):
            raise ConfigurationError(
                f"add_lightning_class_args({lightning_class!r}): expected a class of callbacks. Model and data are "
                "arguments of LightningCLI, and a trainer_class is one too."
            )
        self.classes[nested_key] = lightning_class

    def add_optimizer_args(
        self, optimizer_class: Any = None, nested_key: str = "optimizer", link_to: str = "AUTOMATIC"
    ) -> None:
        """Fix the optimizer's class, whose arguments are then ``--optimizer.NAME``; several leave it to the flag."""
        self._fix(nested_key, "optimizer", optimizer_class, link_to)

    def add_lr_scheduler_args(
        self, lr_scheduler_class: Any = None, nested_key: str = "lr_scheduler", link_to: str = "AUTOMATIC"
    ) -> None:
        """The same for the scheduler."""
        self._fix(nested_key, "lr_scheduler", lr_scheduler_class, link_to)

    def _fix(self, key: str, slot: str, cls: Any, link_to: str) -> None:
        if key != slot or link_to != "AUTOMATIC":
            raise ConfigurationError(
                f"add_{slot}_args(nested_key={key!r}, link_to={link_to!r}): there is one {slot} on the command line, "
                f"{slot!r}. Let the module take further ones as arguments, torch.optim.AdamW for instance as "
                "Callable[[Iterable], Optimizer]."
            )
        if isinstance(cls, type):
            self.defaults = {f"{slot}.class_path": path_of(cls), **self.defaults}

    def dump(self, config: Any = None, **options: Any) -> str:
        """The configuration as YAML."""
        return self.text

    # ------------------------------------------------------------------------------------------------------ inside

    def extend(self, parser: jsonargparse.ArgumentParser) -> None:
        """Give Trivet's parser what was added."""
        for key, cls in self.classes.items():
            parser.add_class_arguments(cls, key, instantiate=False, fail_untyped=False)
        for names, options in self.arguments:
            parser.add_argument(*names, **options)
        for method, given, options in self.others:
            getattr(parser, method)(*given, **options)

    def callbacks(self, job: Job) -> list[Callback]:
        """The callbacks whose arguments were added, made."""
        return [
            cls(**vars(job.values[key]))
            for key, cls in self.classes.items()
            if issubclass(cls, Callback)
        ]  # fmt: skip

    def nested(self, job: Job) -> dict[str, Any]:
        """The values of a command line in Lightning's sections."""
        from ...commands.job import written

        trainer = set(inspect.signature(job.trainer_class).parameters)
        values = written(job.config, job.selection)
        config = {key: value for key, value in values.items() if key not in trainer}
        config["seed_everything"] = config.pop("seed", None)
        return {**config, "trainer": {key: value for key, value in values.items() if key in trainer}}
