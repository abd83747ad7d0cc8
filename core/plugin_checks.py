"""Whether a class is a plugin of its kind: checked when it is selected, before anything is made of it."""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Callable, Set
from difflib import get_close_matches
from typing import Any

from .errors import ConfigurationError, PluginBroken, PluginInvalid
from .requirements import trivet_wanted

# Where each kind's base class is; imported when a plugin of that kind is selected, since most of them import torch.
_BASES = {
    "strategy": ("plugins", "Strategy"),
    "accelerator": ("plugins", "Accelerator"),
    "precision": ("plugins", "Precision"),
    "logger": ("loggers.logger", "Logger"),
    "callback": ("callbacks.callback", "Callback"),
    "environment": ("launch.environment", "Environment"),
    "launcher": ("launch.launcher", "Launcher"),
    "submitter": ("launch.submitter", "Submitter"),
}

INTERFACED = ("strategy", "accelerator", "precision")  # whose base classes are one numbered interface

# The first version of Trivet that spoke each number of `plugins.INTERFACE`.
SPOKEN_SINCE = {1: "0.1"}


def base_class(kind: str) -> type[Any]:
    """The class that every plugin of a kind derives from."""
    module, name = _BASES[kind]
    base: type[Any] = getattr(importlib.import_module(f".{module}", __package__), name)
    return base


def check_class(who: str, cls: type[Any], kind: str, distribution: str = "") -> None:
    """Raise PluginInvalid unless ``cls`` can be used wherever its kind's base class is. ``who`` starts the message."""
    base = base_class(kind)
    if not issubclass(cls, base):
        raise PluginInvalid(
            f"{who} is {cls.__module__}.{cls.__qualname__}, which is not a subclass of trivet's {base.__name__}."
        )
    spoken = base.interface
    if cls.interface != spoken:
        raise PluginInvalid(_another_interface(f"{who} speaks interface {cls.interface!r}", cls, spoken, distribution))
    if missing := [*sorted(getattr(cls, "__abstractmethods__", ())), *_unset_attributes(cls, base)]:
        raise PluginInvalid(f"{who} does not define {', '.join(missing)}, which {base.__name__} asks for.")
    if problems := [
        problem for name in dir(base) if not name.startswith("_") and (problem := _difference(cls, base, name))
    ]:
        raise PluginInvalid(f"{who} differs from {base.__name__}: {'; '.join(problems)}.")
    if kind in INTERFACED and (misspelt := _near_misses(cls, base)):
        raise PluginInvalid(
            f"{who} differs from {base.__name__}: {'; '.join(misspelt)} A method that nobody calls changes nothing: "
            "correct its name, or give it another one, such as one with an underscore in front."
        )


def sets_interface(cls: type[Any], kind: str) -> bool:
    """Whether a plugin, or a class between it and Trivet's, says which interface it was written for."""
    return kind not in INTERFACED or any("interface" in vars(one) for one in _written_by_others(cls, base_class(kind)))


def _written_by_others(cls: type[Any], base: type[Any]) -> list[type[Any]]:
    """The classes of a plugin that are not Trivet's own, the most derived one first."""
    return [one for one in cls.__mro__ if one not in base.__mro__ and not one.__module__.startswith("trivet.")]


def _near_misses(cls: type[Any], base: type[Any]) -> list[str]:
    """Public methods that the base does not have and whose names differ in a letter from one that is not overridden."""
    others = [one for one in _written_by_others(cls, base) if issubclass(one, base)]
    defined = {name: value for one in others for name, value in vars(one).items() if not name.startswith("_")}
    members = [name for name in dir(base) if not name.startswith("_") and name not in defined]
    methods = (types.FunctionType, property, staticmethod, classmethod)
    misspelt = [name for name, value in defined.items() if isinstance(value, methods) and not hasattr(base, name)]
    near = {name: get_close_matches(name, members, n=1, cutoff=0.88) for name in misspelt}
    return [f"{name} is no method of it, did its author mean {found[0]}?" for name, found in near.items() if found]


def _another_interface(who: str, cls: type[Any], spoken: int, distribution: str) -> str:
    """The refusal of an interface number, with the version of Trivet that speaks it as far as that can be known."""
    import trivet

    number, plugin = cls.interface, "the plugin" if distribution in ("", "local") else distribution
    text = f"{who}; this Trivet ({trivet.__version__}) speaks {spoken}."
    if number in SPOKEN_SINCE:
        until = SPOKEN_SINCE.get(number + 1, trivet.__version__)
        return f"{text} Install Trivet from {SPOKEN_SINCE[number]} to before {until}, or a later release of {plugin}."
    if not isinstance(number, int) or number < min(SPOKEN_SINCE):
        return f"{text} No Trivet ever spoke that: install a release of {plugin} that says {spoken}."
    wanted = trivet_wanted(distribution) if distribution else ""
    later = f": pip install '{wanted}'" if wanted else f" than {trivet.__version__} (pip install --upgrade trivet)"
    return f"{text} Install a later Trivet{later}, or a release of {plugin} made for interface {spoken}."


def check_answers(who: str, plugin: Any, kind: str) -> None:
    """Raise PluginInvalid unless what a plugin says of itself before launch has the types that negotiation reads."""
    if kind not in INTERFACED:
        return
    from .plugins import Needs, Policy

    needs, offers = _ask(who, plugin, "needs"), _ask(who, plugin, "offers")
    if not isinstance(needs, Needs):
        raise PluginInvalid(f"{who}: needs is {needs!r}. Expected a trivet.plugins.Needs.")
    for name, value in {"offers": offers, **{f"needs.{side}": names for side, names in vars(needs).items()}}.items():
        if not isinstance(value, Set) or not all(isinstance(one, str) for one in value):
            raise PluginInvalid(f"{who}: {name} is {value!r}. Expected a frozenset of capability names.")
    if kind == "precision" and not isinstance(policy := _ask(who, plugin, "policy"), Policy):
        raise PluginInvalid(f"{who}: policy is {policy!r}. Expected a trivet.plugins.Policy.")


def _ask(who: str, plugin: Any, name: str) -> Any:
    try:
        return getattr(plugin, name)
    except Exception as error:
        raise PluginBroken(f"{who}: asking for its {name} raised {type(error).__name__}: {error}.") from error


def _unset_attributes(cls: type[Any], base: type[Any]) -> list[str]:
    """Class attributes that the base declares without a value and the plugin leaves without one."""
    declared = [name for name, hint in inspect.get_annotations(base).items() if "ClassVar" in str(hint)]
    return [name for name in declared if inspect.getattr_static(cls, name, None) is None and not hasattr(cls, name)]


def _difference(cls: type[Any], base: type[Any], name: str) -> str:
    """How a member cannot be used the way the base's is, or an empty string."""
    theirs, ours = inspect.getattr_static(cls, name), inspect.getattr_static(base, name)
    if theirs is ours:
        return ""
    if isinstance(ours, property):
        return f"{name} must be a property or a value, it is a method" if inspect.isfunction(theirs) else ""
    if not inspect.isfunction(ours):
        return ""
    member = getattr(cls, name)
    if not callable(member):
        return f"{name} must be a method, it is {member!r}"
    if wrapped := _never_runs(theirs, ours):
        return f"{name} {wrapped}"
    expected, actual = inspect.signature(ours), inspect.signature(member)
    bound = not inspect.isfunction(theirs)
    for required_only in (False, True):
        positional, keywords = _call(expected, required_only=required_only)
        try:
            actual.bind(*positional[1 if bound else 0 :], **keywords)
        except TypeError as error:
            sides = f"{name}{_unannotated(actual)} cannot be called as {name}{_unannotated(expected)}"
            return f"{sides} of {base.__name__} can: {error}"
    return ""


def _never_runs(theirs: Any, ours: Any) -> str:
    """Why calling a method does nothing of what stands in it, or an empty string."""
    if inspect.iscoroutinefunction(theirs) or inspect.isasyncgenfunction(theirs):
        return "is a coroutine, which nobody awaits: define it without async"
    context = inspect.isgeneratorfunction(inspect.unwrap(ours)) or "Context" in str(ours.__annotations__.get("return"))
    if context and inspect.isgeneratorfunction(theirs):
        return "yields and is no context manager: decorate it with contextlib.contextmanager"
    return ""


def _unannotated(signature: inspect.Signature) -> inspect.Signature:
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=signature.empty)


def _call(signature: inspect.Signature, *, required_only: bool) -> tuple[list[None], dict[str, None]]:
    """Stand-ins for the arguments of a call: all of them, or only those without a default."""
    asked = [p for p in signature.parameters.values() if p.default is p.empty or not required_only]
    positional = [None for p in asked if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return positional, {p.name: None for p in asked if p.kind is p.KEYWORD_ONLY}


def resolve_function(who: str, function: Any, kind: str, distribution: str = "") -> type[Any] | Callable[..., Any]:
    """Accept a function whose return annotation is a plugin class, or ``type[...]`` of one.

    The first is returned as it is, it takes the options and returns an instance; the second is called, and the class
    that it returns is checked and returned.
    """
    if not inspect.isfunction(function):
        raise PluginInvalid(f"{who} names {function!r}. Expected a class, or a function annotated to return one.")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise PluginInvalid(f"{who}: the annotations of {function.__qualname__} cannot be read: {error}.") from error
    returns = hints.get("return")
    is_factory = typing.get_origin(returns) is type
    cls = typing.get_args(returns)[0] if is_factory else returns
    base = base_class(kind)
    if not isinstance(cls, type) or not issubclass(cls, base):
        expected = base.__name__
        found = f"is annotated to return {returns!r}" if "return" in hints else "has no return annotation"
        raise PluginInvalid(
            f"{who}: the function {function.__qualname__} {found}. Expected a {expected}, or type[{expected}]."
        )
    if not is_factory:
        return typing.cast(Callable[..., Any], function)
    try:
        made = function()
    except Exception as error:
        raise PluginBroken(f"{who}: {function.__qualname__}() raised {type(error).__name__}: {error}.") from error
    if not isinstance(made, type):
        raise PluginInvalid(f"{who}: {function.__qualname__}() returned {made!r}, it is annotated to return a class.")
    check_class(who, made, kind, distribution)
    return made


def check_options(who: str, factory: Callable[..., Any], options: dict[str, Any]) -> None:
    """Raise ConfigurationError for options that a plugin's constructor does not have, and for those it misses."""
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind is not parameter.POSITIONAL_ONLY
    }
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    available = f"Its options: {', '.join(named)}." if named else "It has no options."
    for option in [] if takes_any else options:
        if option not in named:
            near = get_close_matches(str(option), list(named), n=1)
            did_you_mean = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(f"{who} has no option {option!r}.{did_you_mean} {available}")
    missing = [
        name for name, parameter in named.items() if parameter.default is parameter.empty and name not in options
    ]
    if missing:
        raise ConfigurationError(f"{who} needs {', '.join(repr(name) for name in missing)}. {available}")
