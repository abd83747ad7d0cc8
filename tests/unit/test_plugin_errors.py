"""What a plugin author is told: each of these once left somebody guessing."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import pytest
import torch
from distributions import Install
from trivet import registry
from trivet.commands.plugins import show_plugins
from trivet.errors import ConfigurationError, PluginBroken, PluginInvalid
from trivet.plugins import Strategy
from trivet.testing.declared import interface
from trivet.testing.reference import Dtypes
from trivet.testing.tolerance import TOLERANCES, Terms

RING = """
    from trivet.errors import ConfigurationError
    from trivet.plugins import Strategy

    class Ring(Strategy):
        def __init__(self, chunk_mb: float = 25.0) -> None:
            if chunk_mb <= 0:
                raise ConfigurationError(f"ring: chunk_mb={chunk_mb!r} must be positive.")
            self.chunk_mb = chunk_mb
"""


@pytest.mark.parametrize(("written", "meant"), [("reduce", "reduce_"), ("optimiser_step", "optimizer_step")])
def test_a_misspelt_override_is_refused_with_what_was_meant(written: str, meant: str, install: Install) -> None:
    install(
        "acme_ring",
        "ring = acme_ring:Ring",
        f"{RING}\n        def {written}(self, *args, **options): ...",
        kind="strategy",
    )
    with pytest.raises(PluginInvalid, match=f"{written} is no method of it, did its author mean {meant}[?]"):
        registry.load("strategy", "ring")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("async def reduce_(self, parameters): ...", "reduce_ is a coroutine, which nobody awaits"),
        ("async def refuses(self, choice): yield 'clip', 'why'", "refuses is a coroutine, which nobody awaits"),
        ("def no_sync(self, root): yield", "no_sync yields and is no context manager: decorate it with contextlib"),
        ("def full_parameters(self, module, writeback=False): yield", "full_parameters yields and is no context"),
    ],
)
def test_a_method_whose_body_would_never_run_is_refused(body: str, message: str, install: Install) -> None:
    install("acme_ring", "ring = acme_ring:Ring", f"{RING}\n        {body}", kind="strategy")
    with pytest.raises(PluginInvalid, match=message):
        registry.load("strategy", "ring")


def test_generators_that_are_iterated_are_right(install: Install) -> None:
    body = "\n        def refuses(self, choice): yield 'clip', 'why'"
    install("acme_ring", "ring = acme_ring:Ring", RING + body, kind="strategy")
    registry.load("strategy", "ring")


def test_the_check_of_a_callback_names_its_misnamed_hooks(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    code = """
    from trivet import Callback

    class Late(Callback):
        def __init__(self, must: int) -> None: ...
        def on_train_bach_end(self, trainer, module, outputs, batch, batch_idx): ...
    """
    install("acme_late", "late = acme_late:Late", code, kind="callback")
    assert show_plugins(["callback", "--check", "--json"], prog="trivet plugins") == 1
    (row,) = (row for row in json.loads(capsys.readouterr().out) if row["name"] == "late")
    assert row["check"]["status"] == "broken"
    assert "Did you mean 'on_train_batch_end'?" in row["check"]["reason"]


def test_methods_of_ones_own_are_no_misspellings() -> None:
    class Mine(Strategy):
        def _reduce(self) -> None: ...

        def meet(self) -> None: ...

        def reduce(self) -> None: ...

        def reduce_(self, parameters: object) -> None: ...  # so `reduce` is not meant to be it

    registry.make("strategy", Mine)


def test_what_a_constructor_refuses_is_told_without_its_frames(install: Install) -> None:
    folder = install("acme_ring", "ring = acme_ring:Ring", RING, kind="strategy")
    with pytest.raises(ConfigurationError, match=r"^ring: chunk_mb=0 must be positive.$") as caught:
        registry.make("strategy", {"name": "ring", "chunk_mb": 0})
    assert str(folder) not in "".join(traceback.format_exception(caught.value))


def test_a_folder_that_hides_a_module_is_named(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme_hidden", "sharp = acme_shadow:Good")
    (tmp_path / "here" / "acme_shadow").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    with pytest.raises(PluginBroken, match=rf"no attribute 'Good'; it was imported from .*{tmp_path}/here/acme_shadow"):
        registry.load("precision", "sharp")


@pytest.mark.parametrize("says", [False, True])
def test_a_class_that_does_not_set_the_interface_is_told_so(
    says: bool, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("acme_ring", "ring = acme_ring:Ring", RING + ("\n        interface = 1" if says else ""), kind="strategy")
    assert show_plugins(["strategy", "--check", "--json"], prog="trivet plugins") == 0
    (row,) = (row for row in json.loads(capsys.readouterr().out) if row["name"] == "ring")
    assert ("does not set interface" in str(row["check"].get("doubts"))) is not says
    selected = registry.make("strategy", "ring")
    if says:
        interface(selected, Terms())
    else:
        with pytest.raises(AssertionError, match=r"does not set interface.*set it to 1"):
            interface(selected, Terms())


def test_the_listing_shows_options(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme_ring", "ring = acme_ring:Ring", RING, kind="strategy")
    assert show_plugins(["strategy", "--check"], prog="trivet plugins") == 0
    assert "options     chunk_mb=25.0" in capsys.readouterr().out


def test_what_is_rounded_on_the_way_is_allowed_for() -> None:
    plain = Dtypes(reduce=torch.float32)
    narrow = Dtypes(reduce=torch.bfloat16)
    assert Terms().bounds(plain) == TOLERANCES[torch.float32, torch.float32]
    assert Terms().bounds(narrow).gradients == TOLERANCES[torch.float32, torch.bfloat16].gradients
