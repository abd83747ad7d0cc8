"""Links: values of one part that another is made with, such as the number of classes that only the data knows.

A link goes from a source to a target, ``{"data.num_classes": "model.num_classes"}``. A source that is an argument is
read where it is parsed; any other is an attribute of the made object. If that has none (or None) yet, a second data
module is made, prepared and set up for the question, and let go: the run's own is set up in each of its processes.

What a link says is above configuration files, and below the environment and flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigurationError
from ..hooks import overrides
from ..launch import environments
from .mistakes import nearest
from .selection import Selection

if TYPE_CHECKING:
    from ..data.datamodule import DataModule

MADE = ("data", "model")  # what attributes can be read of

Target = str | tuple[str, Callable[..., Any]]
Links = Mapping[str | tuple[str, ...], Target | Sequence[str]] | Sequence["Link"]


@dataclass(frozen=True)
class Link:
    """``compute`` is given the values of the sources, in their order; None passes the only one on.

    ``when`` is ``"parse"`` (the sources are arguments), ``"instantiate"`` (they are attributes), or "" for what they
    are: an argument that is not None, else an attribute.
    """

    sources: tuple[str, ...]
    target: str
    compute: Callable[..., Any] | None = None
    when: Literal["", "parse", "instantiate"] = ""

    def __str__(self) -> str:
        return f"the link from {' and '.join(self.sources)} to {self.target}"

    def value(self, found: Sequence[Any]) -> Any:
        if self.compute is not None:
            return self.compute(*found)
        return found[0]


def read_links(links: Any, where: str) -> list[Link]:
    """What was declared as a mapping, or as Links."""
    if not isinstance(links, Mapping):
        if isinstance(links, Sequence) and all(isinstance(link, Link) for link in links):
            return [
                Link(tuple(map(_plain, link.sources)), _plain(link.target), link.compute, link.when) for link in links
            ]
        raise ConfigurationError(f"{where}: {links!r}. Expected a mapping such as data.num_classes: model.num_classes.")
    found = []
    for source, target in links.items():
        sources = tuple(map(_plain, (source,) if isinstance(source, str) else source))
        compute = None
        if isinstance(target, tuple) and len(target) == 2 and callable(target[1]):
            target, compute = target
        for one in [target] if isinstance(target, str) else target:
            if not isinstance(one, str) or not all("." in name or name in MADE for name in sources):
                raise ConfigurationError(
                    f"{where}: {source!r}: {target!r}. Expected one such as data.num_classes: model.num_classes."
                )
            found.append(Link(sources, _plain(one), compute))
    return found


def declared(script: Any, selection: Selection) -> list[Link]:
    """All links: of the script, of files, and of ``cli_links`` of the selected classes. The later ones win."""
    found = read_links(script.links, "links")
    for key in MADE:
        own = getattr(selection.targets.get(key), "cli_links", None)
        if own is not None:
            found += read_links(own, f"{getattr(selection.targets[key], '__name__', key)}.cli_links")
    for where, links in selection.settings.links:
        found += read_links(links, f"{where}: links")
    return list({link.target: link for link in found}.values())


def _plain(key: str) -> str:
    """Lightning's spelling of a key in ours."""
    return key.removeprefix("trainer.").replace(".init_args.", ".")


# -------------------------------------------------------------------------------------------------------------- filling


class Filling:
    """The links of one command line: `static` ones first, others `of` an object when it is made.

    A link whose source is another's target follows it, in whatever order they were declared.
    """

    def __init__(self, links: Iterable[Link], selection: Selection, known: set[str]) -> None:
        self.selection, self.known = selection, known
        self.links = list(links)
        self.filled: dict[str, Link] = {}
        self._objects: dict[str, Any] = {}
        self._again: Callable[[], Any] = lambda: None
        self._second: Any = None
        for link in self.links:
            if link.target not in known:
                raise ConfigurationError(f"{link}: there is no {link.target!r}.{nearest(link.target, known, '')}")

    def static(self, values: Any) -> None:
        """Fill what arguments say, but not what a flag or the environment has given."""
        origins = self.selection.settings.origins
        given = {flag.key for flag in self.selection.flags}
        given |= {key for key, found in origins.items() if found[-1].source.startswith(("--", "TRIVET_"))}
        self.links = [link for link in self.links if link.target not in given]
        _refuse_circles(self.links)
        self._settle(values)
        for link in list(self.links):
            for source in link.sources:
                if source not in self.known and (link.when == "parse" or _head(source) not in MADE):
                    raise ConfigurationError(f"{link}: there is no {source!r}.{nearest(source, self.known, '')}")
            lacking = next((head for head in self._needs(link, values) if head not in self.selection.targets), None)
            if lacking is None:
                continue
            self.links.remove(link)
            if values.get(link.target) is None:
                raise ConfigurationError(
                    f"{link}: no {lacking} is selected. Add --{lacking} CLASS, or give --{link.target}."
                )

    def order(self, values: Any) -> list[str]:
        """What is made first, so that its attributes can be read."""
        pairs = {(head, _head(link.target)) for link in self.links for head in self._needs(link, values)}
        for link in self.links:
            if _head(link.target) in self._needs(link, values):
                raise ConfigurationError(f"{link}: {_head(link.target)} would have to be made before it is made.")
        if ("data", "model") in pairs and ("model", "data") in pairs:
            raise ConfigurationError("links go from data to model and from model to data: neither can be made first.")
        return ["model", "data"] if ("model", "data") in pairs else ["data", "model"]

    def waits(self, key: str, values: Any) -> bool:
        """Whether a link waits for this part to be made."""
        return any(key in self._needs(link, values) for link in self.links)

    def of(self, key: str, made: Any, again: Callable[[], Any], stage: str, values: Any) -> None:
        """Fill what the attributes of a made object say; ``again`` makes a second one, to be set up."""
        self._objects[key] = made
        if key == "data":
            self._again = again
        while link := next((link for link in self.links if self._is_due(link, values)), None):
            found = [self._attribute(source, values) for source in link.sources]
            if all(source in self.known for source in link.sources):
                self._fill(link, found, values)  # None as well: it is what the argument is
                continue
            if None in found and "data" in self._needs(link, values):
                self._second = self._second or _set_up(self._again(), stage, link)
                found = [self._attribute(source, values) for source in link.sources]
            if None in found:
                source = link.sources[found.index(None)]
                owner = type(self._objects.get(_head(source), made)).__name__
                raise ConfigurationError(
                    f"{link}: {owner} has no {source.partition('.')[2]!r}"
                    f"{', also after setup' if _head(source) == 'data' else ''}. Set it as an attribute, or give "
                    f"--{link.target}."
                )
            self._fill(link, found, values)

    # --------------------------------------------------------------------------------------------------------- inside

    def _settle(self, values: Any) -> None:
        """Fill all that arguments say, as far as they are not to be filled themselves."""
        while link := next((link for link in self.links if self._is_static(link, values)), None):
            self._fill(link, [values.get(source) for source in link.sources], values)

    def _is_static(self, link: Link, values: Any) -> bool:
        if link.when == "instantiate" and any(_head(source) in MADE for source in link.sources):
            return False
        known = all(source in self.known for source in link.sources)
        return known and not self._follows(link) and not self._needs(link, values)

    def _is_due(self, link: Link, values: Any) -> bool:
        return not self._follows(link) and self._needs(link, values) <= self._objects.keys()

    def _follows(self, link: Link) -> bool:
        """Whether another link fills what this one reads."""
        return any(other.target in link.sources for other in self.links)

    def _needs(self, link: Link, values: Any) -> set[str]:
        """The objects whose attributes a link reads."""
        if link.when == "parse":
            return set()
        others = {other.target for other in self.links}
        return {
            _head(source)
            for source in link.sources
            if _head(source) in MADE
            and source not in others
            and (link.when == "instantiate" or source not in self.known or values.get(source) is None)
        }

    def _attribute(self, source: str, values: Any) -> Any:
        """A source that may be the object itself, its attribute, or an argument that it did not keep."""
        objects = [self._objects.get(_head(source)), self._second if _head(source) == "data" else None]
        for made in objects:
            for name in source.split(".")[1:]:
                made = getattr(made, name, None)
            if made is not None:
                return made
        return values.get(source)

    def _fill(self, link: Link, found: Sequence[Any], values: Any) -> None:
        self.links.remove(link)
        self.filled[link.target] = link
        values[link.target] = link.value(found)
        self._settle(values)


def _refuse_circles(links: Iterable[Link]) -> None:
    left = list(links)
    while free := [link for link in left if not any(other.target in link.sources for other in left)]:
        left = [link for link in left if link not in free]
    if left:
        raise ConfigurationError(f"{left[0]}: links go in a circle, over {', '.join(link.target for link in left)}.")


def _head(key: str) -> str:
    return key.partition(".")[0]


def _set_up(data: DataModule, stage: str, link: Link) -> DataModule:
    from ..data.datamodule import DataModule as Base

    world = environments.detect()
    if overrides(data, Base, "prepare_data"):
        if world is not None and world.world_size > 1:
            raise ConfigurationError(
                f"{link} is known after setup only, and {type(data).__name__} has a prepare_data, which one of the "
                f"{world.world_size} processes would have to finish before. Give --{link.target}, set the attribute in "
                "__init__, or let Trivet start the processes (--devices)."
            )
        data.prepare_data()
    data.setup(stage)
    return data
