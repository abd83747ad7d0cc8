"""Imports without the garbage collector, in Trivet's own programs alone."""

import gc
import sys

import pytest
from trivet.imports import uncollected


@pytest.fixture
def fresh(monkeypatch):
    """A process that has not imported torch yet."""
    monkeypatch.delitem(sys.modules, "torch")
    yield
    gc.unfreeze()


def test_what_is_imported_is_never_looked_at_again(fresh):
    before = gc.get_freeze_count()
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


def test_also_where_the_import_fails(fresh):
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()


def test_who_turned_the_collector_off_keeps_it_off(fresh):
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_process_that_has_torch_is_somebody_elses():
    before = gc.get_freeze_count()
    with uncollected():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before
