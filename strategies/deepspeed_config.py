"""What DeepSpeed is configured with: our flags and the user's JSON file, which must not contradict one another."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from trivet.errors import ConfigurationError
from trivet.plugins import Choice

# what somebody else decides: the section of the file, and who
DECIDED = {
    "optimizer": "the module's configure_optimizers makes the optimizer",
    "scheduler": "the module's configure_optimizers makes the schedulers",
    "amp": "--precision chooses the dtypes",
}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Wish(NamedTuple):
    """One value that a flag decides: where it is in DeepSpeed's configuration, and the axis and flag it comes from."""

    path: tuple[str, ...]
    value: Any
    axis: str
    flag: str


def read(source: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """The file's content without what it leaves to us (``"auto"``). Raises ConfigurationError."""
    if source is None:
        return {}
    if isinstance(source, Mapping):
        content: Any = dict(source)
    else:
        try:
            content = json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"deepspeed: config={str(source)!r} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"deepspeed: config={source!r} holds {content!r}, expected a JSON object.")
    for section, why in DECIDED.items():
        if section in content:
            raise ConfigurationError(f"deepspeed: {of(source)} has a section {section!r}, but {why}. Remove it.")
    return _without_auto(content)


def of(source: str | Mapping[str, Any] | None) -> str:
    """How messages name the configuration."""
    return f"config={str(source)!r}" if isinstance(source, (str, Path)) else "the given config"


def wishes(choice: Choice, stage: int, offload_device: str) -> Iterator[Wish]:
    """All that flags decide."""
    strategy = "strategy"
    yield Wish(("zero_optimization", "stage"), stage, strategy, f"--strategy.stage {stage}")
    if stage > 0:
        flag = f"--strategy.offload_optimizer {str(offload_device != 'none').lower()}"
        yield Wish(("zero_optimization", "offload_optimizer", "device"), offload_device, strategy, flag)
    if choice.accumulate is not None:
        flag = f"--accumulate_grad_batches {choice.accumulate}"
        yield Wish(("gradient_accumulation_steps",), choice.accumulate, "accumulate", flag)
    clip = 0.0 if choice.clip is None else choice.clip.value
    flag = f"--gradient_clip_val {'null' if choice.clip is None else clip}"
    yield Wish(("gradient_clipping",), clip, "clip", flag)
    if choice.policy is not None:
        dtype = choice.policy.param
        for section, enabled in (
            ("fp16", dtype == torch.float16),
            ("bf16", dtype == torch.bfloat16),
            ("torch_autocast", False),  # the precision's own autocast is entered in the step, where it is needed
        ):
            flag = f"--precision with parameters in {NAMES.get(dtype, dtype)}"
            yield Wish((section, "enabled"), enabled, "precision", flag)
        reduce = choice.policy.reduce
        if reduce in NAMES:
            flag = f"--precision, which reduces in {NAMES[reduce]}"
            yield Wish(("communication_data_type",), NAMES[reduce], "precision", flag)


def contradictions(file: Mapping[str, Any], source: Any, wanted: Iterable[Wish]) -> Iterator[tuple[str, str]]:
    """Where the file says something else than a flag: the axis, and a sentence with both values and both sources."""
    for wish in wanted:
        found = _look(file, wish.path)
        if found is not None and found != wish.value:
            name = ".".join(wish.path)
            yield (
                wish.axis,
                f"{of(source)} says {name} = {found!r}, but {wish.flag} makes it {wish.value!r}. Let them agree, or "
                f'write "auto" into the file.',
            )


def merge(file: Mapping[str, Any], wanted: Iterable[Wish]) -> dict[str, Any]:
    """The file with what the flags decide."""
    merged: dict[str, Any] = json.loads(json.dumps(file))
    for wish in wanted:
        section = merged
        for name in wish.path[:-1]:
            section = section.setdefault(name, {})
        section[wish.path[-1]] = wish.value
    return merged


def _look(content: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        content = content.get(name) if isinstance(content, Mapping) else None
    return content


def _without_auto(content: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if value != "auto"
    }
