"""The order of all hooks, with their arguments, against Lightning's: hook_order/expected.txt lists every difference."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import trivet
from trivet.callbacks.callback import Callback
from trivet.hooks import names_of

FOLDER = Path(__file__).parent / "hook_order"
LIGHTNING = json.loads((FOLDER / "lightning.json").read_text())
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "num_sanity_val_steps": 0,
}  # fmt: skip
NOT_IN_LIGHTNING = {"on_update_end", "on_exception"}  # the update is our unit; a module may hear of exceptions, too


def load_tracer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tracer", FOLDER / "tracer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tracer = load_tracer()


def expected() -> dict[str, list[str]]:
    """The lines of each entry point."""
    sections: dict[str, list[str]] = {}
    for line in (FOLDER / "expected.txt").read_text().splitlines():
        if line.startswith("["):
            name = line.strip("[]")
            sections[name] = []
        elif line and not line.startswith("#"):
            sections[name].append(line)
    return sections


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    traces: dict[str, list[str]] = tracer.program(trivet, trivet.Module, trivet.DataModule, **QUIET)
    return traces


@pytest.mark.parametrize("entry", [name for name in LIGHTNING if name != "version"])
def test_the_order_is_lightnings_but_for_what_is_written_down(entry: str, found: dict[str, list[str]]) -> None:
    lines = expected()[entry]
    calls = [(line[:2], line[2:].partition("  # ")) for line in lines]
    assert {mark for mark, _ in calls} <= {"  ", "- ", "+ "}
    assert [call for mark, (call, _, _) in calls if mark != "- "] == found[entry]
    assert [call for mark, (call, _, _) in calls if mark != "+ "] == LIGHTNING[entry]
    assert all(reason for mark, (_, _, reason) in calls if mark != "  "), "a difference has no reason"


def test_every_hook_is_traced() -> None:
    assert set(names_of(trivet.Module)) - set(tracer.MODULE) == NOT_IN_LIGHTNING
    assert set(names_of(Callback)) - set(tracer.CALLBACK) == NOT_IN_LIGHTNING - {"on_exception"}
    assert set(names_of(trivet.DataModule)) <= set(tracer.DATA)
