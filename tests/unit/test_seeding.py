from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from trivet.errors import ConfigurationError
from trivet.seeding import derive, mark, of_host, of_torch, seed_all, seed_everything


@pytest.fixture(autouse=True)
def _restored_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_SEED", "0")
    monkeypatch.delenv("TRIVET_SEED")


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seed_everything_seeds_three_generators_and_returns_the_seed():
    assert seed_everything(7) == 7
    first = draw()
    assert torch.initial_seed() == 7
    assert os.environ["TRIVET_SEED"] == "7"
    seed_everything(7)
    assert draw() == first
    seed_everything(8)
    assert draw() != first


def test_seed_everything_takes_the_environment_then_draws(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRIVET_SEED", "42")
    assert seed_everything() == 42
    monkeypatch.delenv("TRIVET_SEED")
    drawn = seed_everything()
    assert 0 <= drawn < 2**32
    assert os.environ["TRIVET_SEED"] == str(drawn)


@pytest.mark.parametrize("seed", [-1, 2**32, "x"])
def test_a_seed_out_of_range_is_refused(seed: object):
    with pytest.raises(ConfigurationError, match="expected an integer from 0 to 4294967295"):
        seed_everything(seed)  # type: ignore[arg-type]


def test_a_bad_environment_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRIVET_SEED", "abc")
    with pytest.raises(ConfigurationError, match="TRIVET_SEED got the seed 'abc'"):
        seed_everything()


def test_derive_is_the_same_in_every_process_and_differs_by_position():
    code = "from trivet.seeding import derive; print(derive(1, 2, 3))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "5"},
    )
    assert int(other.stdout) == derive(1, 2, 3)
    values = {derive(1, epoch, position) for epoch in range(50) for position in range(200)}
    assert len(values) == 10_000
    assert all(0 <= value < 2**63 for value in values)


def test_seed_all_takes_63_bits():
    value = derive(1, 2)
    seed_all(value)
    first = draw()
    seed_all(value)
    assert draw() == first


DRAWS = {
    "random": random.random,
    "random 624 words": lambda: [random.random() for _ in range(312)],
    "random gauss": lambda: random.gauss(0, 1),
    "random seed": lambda: random.seed(0),
    "numpy": np.random.rand,
    "numpy 624 words": lambda: np.random.rand(312),
    "numpy gauss": np.random.randn,
    "numpy seed": lambda: np.random.seed(0),
    "torch": lambda: torch.rand(()),
    "torch 624 words": lambda: torch.rand(624),
    "torch normal": lambda: torch.randn(()),
    "torch dropout": lambda: torch.dropout(torch.ones(2), 0.5, True),
    "torch seed": lambda: torch.default_generator.manual_seed(0),
    "torch state": lambda: torch.set_rng_state(torch.Generator().get_state()),
    "numpy state": lambda: np.random.set_state(np.random.RandomState(1).get_state()),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_mark_tells_a_draw(name: str):
    seed_all(derive(1, 2))
    before = mark()
    torch.rand(3, generator=torch.Generator())
    random.Random(1).random()
    np.random.RandomState(1).rand()
    assert mark() == before  # so this interpreter, numpy and torch keep their words where they are looked for
    DRAWS[name]()
    moved, kept = (of_torch, of_host) if name.startswith("torch") else (of_host, of_torch)
    assert mark()[moved] != before[moved]
    assert mark()[kept] == before[kept]
