from __future__ import annotations

import builtins
import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from trivet.checkpoint import directory, listing, manifest, newest, places, sums, writing
from trivet.errors import CheckpointError, ConfigurationError
from trivet.state import TrainState


def make_state(fill: float = 1.0) -> TrainState:
    """A state with something in every field."""
    module = {"net.weight": torch.full((3, 2), fill), "net.count": torch.tensor(4), "half": torch.ones(2).bfloat16()}
    adam = {"net.weight": {"step": torch.tensor(2.0), "exp_avg": torch.full((3, 2), fill / 2), "kind": "a"}, "half": {}}
    return TrainState(
        progress={"epoch": 1, "update": 2},
        beside={"average/weight": torch.ones(3)},
        strategy={"all/anchor/weight": torch.ones(3), "rank0/error/weight": torch.zeros(3)},
        module=module,
        optimizers=[
            {"state": adam, "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["net.weight", "half"]}]},
            {"state": {}, "groups": []},
        ],
        schedulers=[{"last_epoch": 2}],
        scaler={"scale": 8.0},
        data={"position": 3},
        seed=7,
        host_noise=[4, 5],
        torch_noise=[4, 3],
        metrics={"loss": {"total": torch.tensor(1.0)}},
        callbacks={"Stop": {"wait": 1}},
        datamodule={"a": 1},
        user={"b": [1, 2]},
        hparams={"lr": 0.1},
        plan={"strategy": "single"},
    )


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def write(path: Path, state: TrainState, metrics: dict[str, float] | None = None) -> None:
    directory.write(path, state, rank=0, world_size=1, metrics=metrics)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write(tmp_path / "one", make_state(), {"val/loss": 0.5, "bad": float("nan")})
    return tmp_path / "one"


def test_every_field_comes_back(saved: Path) -> None:
    found, expected = directory.read(saved), make_state()
    for f in fields(TrainState):
        assert getattr(expected, f.name), f"the test's state has nothing in {f.name}"
        assert_same(getattr(expected, f.name), getattr(found, f.name))
    assert list(saved.parent.iterdir()) == [saved]


def test_manifest_says_what_is_there(saved: Path) -> None:
    found = directory.manifest(saved)
    assert found["metrics"]["val/loss"] == 0.5
    assert found["metrics"]["bad"] != found["metrics"]["bad"]
    assert (found["progress"], found["plan"], found["world_size"]) == (
        {"epoch": 1, "update": 2},
        {"strategy": "single"},
        1,
    )
    files = {p.relative_to(saved).as_posix() for p in saved.rglob("*") if p.is_file()}
    assert set(found["files"]) == files - {"manifest.json"}
    assert directory.complete(saved)
    assert str(saved.parent).encode() not in (saved / "tensors/.metadata").read_bytes()


def test_template_is_filled_in_place(saved: Path) -> None:
    template = make_state(0.0)
    before = dict(template.module)
    found = directory.read(saved, template)
    assert all(found.module[name] is before[name] for name in before)
    assert_same(make_state().module, template.module)
    converted = TrainState(module={name: t.double() if t.is_floating_point() else t for name, t in before.items()})
    assert directory.read(saved, converted, beside=False).module["half"].dtype == torch.float64


def test_weights_alone(saved: Path) -> None:
    assert_same(make_state().module, directory.read_weights(saved))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("half"), "not in the module: 'half'"),
        (lambda m: m.update(more=torch.ones(1)), "missing in the checkpoint: 'more'"),
        (lambda m: m.update(half=torch.ones(3)), r"'half' has shape \(2,\), the module's has \(3,\)"),
        (
            lambda m: m.update(half=torch.ones(2, dtype=torch.int64)),
            "'half' is torch.bfloat16, the module's is torch.int64",
        ),
    ],
)
def test_a_module_that_differs_is_refused_untouched(saved: Path, change: Callable[[Any], Any], message: str) -> None:
    template = make_state(0.0)
    change(template.module)
    with pytest.raises(CheckpointError, match=message):
        directory.read(saved, template)
    assert not template.module["net.weight"].any()


def test_a_checkpoint_of_the_same_name_is_replaced(saved: Path) -> None:
    write(saved, make_state(3.0))
    assert directory.read(saved).module["net.weight"][0, 0] == 3
    assert list(saved.parent.iterdir()) == [saved]


def test_anything_else_of_that_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter").write_text("words")
    (tmp_path / "file").write_text("words")
    for name in ("thesis", "file"):
        with pytest.raises(CheckpointError, match=f"cannot write checkpoint .*{name}.* no checkpoint"):
            write(tmp_path / name, make_state())
    assert (tmp_path / "thesis/chapter").read_text() == "words"
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", make_state())


def test_what_is_not_plain_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    state = make_state()
    state.callbacks["Mine"] = {"lock": object()}
    with pytest.raises(ConfigurationError, match=r"callbacks\['Mine'\]\['lock'\] is a object"):
        write(tmp_path / "one", state)
    assert list(tmp_path.iterdir()) == []


def fail_open(suffix: str, error: OSError) -> Callable[..., Any]:
    real = builtins.open

    def fake(file: Any, *args: Any, **kwargs: Any) -> Any:
        if str(file).endswith(suffix):
            raise error
        return real(file, *args, **kwargs)

    return fake


@pytest.mark.parametrize("where", [".distcp", ".metadata.tmp", "state.pt", "manifest.json", "rename", "mkdir", "fsync"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.ENOENT])
def test_a_write_error_is_raised_and_the_old_checkpoint_stays(
    saved: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    error = OSError(number, os.strerror(number))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        if where == "rename":
            patch.setattr(places.os, "rename", fail)
        elif where == "mkdir":
            patch.setattr(places.Path, "mkdir", fail)
        elif where == "fsync":
            patch.setattr(os, "fsync", fail)
        elif where in ("state.pt", "manifest.json"):
            patch.setattr(builtins, "open", fail_open(where, error))
        else:
            real = Path.open
            patch.setattr(Path, "open", lambda p, *a, **k: fail() if str(p).endswith(where) else real(p, *a, **k))
        with pytest.raises(CheckpointError, match=f"cannot write checkpoint {str(saved)!r}: .*{os.strerror(number)}"):
            write(saved, make_state(5.0))
    assert directory.read(saved).module["net.weight"][0, 0] == 1
    assert list(saved.parent.iterdir()) == [saved]


def test_a_directory_that_vanishes_during_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = places.begin

    def begin(target: Path) -> Path:
        temporary = real(target)
        shutil.rmtree(tmp_path)
        tmp_path.write_text("")  # a file in its place, since DCP would make the directory again
        return temporary

    monkeypatch.setattr(writing, "begin", begin)
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*(NotADirectoryError|FileExistsError)"):
        write(tmp_path / "one", make_state())


def test_missing_and_truncated_files_are_listed(saved: Path) -> None:
    (saved / "state.pt").unlink()
    data = saved / "tensors/__0_0.distcp"
    size = data.stat().st_size
    os.truncate(data, 10)
    assert not directory.complete(saved)
    with pytest.raises(CheckpointError, match=f"state.pt is missing; .*__0_0.distcp has 10 bytes instead of {size}"):
        directory.read(saved)


def test_no_manifest_is_no_checkpoint(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    assert not directory.complete(saved)
    for read in (directory.read, directory.read_weights, directory.manifest):
        with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
            read(saved)
    with pytest.raises(CheckpointError, match="it does not exist"):
        directory.read(saved.parent / "two")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="other"), "its format is not 'trivet-checkpoint'"),
        (lambda m: m.update(version=99), "its format version is 99, .* update Trivet"),
        (lambda m: m.update(version="1"), "its version is '1'"),
        (lambda m: m.update(files=[]), "'files' is"),
        (lambda m: m.update(metrics={"a": []}), "bad manifest.json"),
        (lambda m: m.update(metrics={"a": 10**400}), "bad manifest.json"),
        (lambda m: m["progress"].update(update="x"), "'progress' is .*, expected numbers"),
        (lambda m: m["progress"].update(update=10**400), "'progress' is .*, expected numbers"),
        (lambda m: m.update(created=None), "'created' is None"),
        (lambda m: m["files"].update({"a" * 5000: {"size": 1}}), "is none that a checkpoint has"),
        (lambda m: m["files"].update({"../../etc/passwd": {"size": 1}}), "'../../etc/passwd' leaves the directory"),
        (lambda m: m["files"].update({"/etc/passwd": {"size": 1}}), "'/etc/passwd' leaves the directory"),
        (lambda m: m["files"].update({"a": 3}), "file 'a' has the entry 3"),
        (lambda m: m["files"].pop("state.pt"), "its manifest does not list 'state.pt'"),
        (lambda m: m["files"].pop("tensors/__0_0.distcp"), "__0_0.distcp is not in the manifest"),
    ],
)
def test_a_hostile_manifest(saved: Path, change: Callable[[Any], Any], message: str) -> None:
    values = json.loads((saved / "manifest.json").read_text())
    change(values)
    (saved / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        directory.read(saved)
    if "does not list" not in message:  # which only who reads the tensors asks
        assert not newest.complete([saved.parent])
        assert [bool(one.problems) for one in listing.find(saved.parent)] == [True]


class Bomb:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize("name", ["state.pt", "tensors/.metadata", "tensors/__0_0.distcp"])
@pytest.mark.parametrize("payload", ["bomb", "noise"])
def test_hostile_files_run_nothing_and_change_nothing(
    saved: Path, monkeypatch: pytest.MonkeyPatch, name: str, payload: str
) -> None:
    monkeypatch.chdir(saved.parent)
    file = saved / name
    size = file.stat().st_size
    if payload == "bomb" and name == "state.pt":
        torch.save({"a": Bomb()}, file)
    else:
        content = pickle.dumps(Bomb()) if payload == "bomb" else b"\x80\x02noise"
        file.write_bytes(content + b"\0" * (size - len(content)))
    values = json.loads((saved / "manifest.json").read_text())
    values["files"][name] = dict(sums.read_sum(file))
    (saved / "manifest.json").write_text(json.dumps(values))
    template = make_state(0.0)
    with pytest.raises(CheckpointError, match="cannot read checkpoint"):
        directory.read(saved, template)
    assert not template.module["net.weight"].any()
    assert not Path("exploded").exists()


def test_damage_inside_the_tensors_changes_nothing(saved: Path) -> None:
    file = saved / "tensors/__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2 :] = b"\0" * (len(content) - len(content) // 2)
    file.write_bytes(content)
    template = make_state(0.0)
    with pytest.raises(CheckpointError, match="cannot read checkpoint"):
        directory.read(saved, template)
    assert not template.module["net.weight"].any()
    assert not template.module["half"].eq(0).any()


def test_sweep_removes_dead_saves_only(saved: Path) -> None:
    place = saved.parent
    dead, live = place / ".two.tmp-0123456789ab", place / ".two.tmp-ba9876543210"
    dead.mkdir()
    live.mkdir()
    (place / ".keep").mkdir()
    with places.locked(live, True):
        assert directory.sweep(place) == [dead]
    assert sorted(p.name for p in place.iterdir()) == sorted([".keep", live.name, "one"])


@pytest.mark.parametrize("new_complete", [True, False])
def test_sweep_finishes_a_replacement_that_a_kill_cut_short(saved: Path, new_complete: bool) -> None:
    place = saved.parent
    write(place / "two", make_state(2.0))
    os.rename(saved, place / ".one.old-0123456789ab")
    os.rename(place / "two", place / ".one.tmp-0123456789ab")
    if not new_complete:
        (place / ".one.tmp-0123456789ab" / manifest.NAME).unlink()
    directory.sweep(place)
    assert [p.name for p in place.iterdir()] == ["one"]
    assert directory.read(saved).module["net.weight"][0, 0] == (2 if new_complete else 1)


def test_dcp_is_imported_only_when_needed() -> None:
    code = (
        "import sys, trivet.callbacks.checkpoint, trivet.checkpoint.directory;"
        "assert 'torch.distributed.checkpoint' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
