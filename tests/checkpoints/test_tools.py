"""``trivet checkpoint``: what it prints, what it writes and its exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.callbacks.checkpoint import Checkpoint
from trivet.checkpoint import directory
from trivet.commands.entry import run
from trivet.errors import CheckpointError
from trivet.state import TrainState


class Net(trivet.Module):
    """Tied weights, a frozen layer and a buffer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 3))
        self.tied = nn.Linear(3, width)
        self.tied.weight = self.model[0].weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("count", torch.tensor(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.frozen(batch[0])
        return (self.model(x).sum(1) + self.tied(x).sum(1)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.01)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.linspace(-1, 1, 12).view(4, 3)), 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Net]:
    """A run directory with three checkpoints, and the module as the last of them has it."""
    place = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    module = Net()
    save = Checkpoint(place / "checkpoints", filename="{epoch}", monitor="loss", save_top_k=-1, save_last=True)
    trivet.Trainer(
        accelerator="cpu", strategy="single", logger=False, enable_progress_bar=False, max_epochs=3, callbacks=[save]
    ).fit(module, loader(), loader())
    return place, module


@pytest.fixture
def runs(trained: tuple[Path, Net], tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained[0], tmp_path / "run"))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def call(*args: object) -> tuple[int, str]:
        capsys.readouterr()
        code, _ = run(["checkpoint", *map(str, args)], prog="trivet")
        out = capsys.readouterr()
        assert code == 2 or not out.err
        text = out.out + out.err
        assert all(len(line) <= 80 or "/" in line for line in out.out.splitlines() if "--json" not in args), text
        return code, text

    return call


Command = Callable[..., tuple[int, str]]


def rewrite(path: Path, name: str, change: Callable[[bytearray], object]) -> None:
    data = bytearray((path / name).read_bytes())
    change(data)
    (path / name).write_bytes(data)


# ------------------------------------------------------------------------------------------------------ list, inspect


def test_list(runs: Path, command: Command) -> None:
    code, text = command("list", runs)
    lines = text.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == [f"checkpoints/{n}" for n in (1, 2, 3)]
    assert "epoch 2  update 4" in lines[1]
    assert "loss=" in lines[1]
    assert "<- last, best loss" in lines[2]
    assert "<-" not in lines[0] + lines[1]


def test_list_tells_what_is_not_complete(runs: Path, command: Command) -> None:
    (runs / "checkpoints/1/state.pt").unlink()
    (runs / "checkpoints/.4.tmp-0123456789ab").mkdir()
    (runs / "checkpoints/2/manifest.json").write_text("{")
    code, text = command("list", runs)
    assert code == 1
    assert text.count("INCOMPLETE") == 3
    for reason in ("state.pt is missing", "a save that is going on, or was cut short", "Expecting property name"):
        assert reason in " ".join(text.split())
    code, text = command("list", runs, "--json")
    assert [one["complete"] for one in json.loads(text)] == [False, False, False, True]


def test_list_of_nothing(tmp_path: Path, command: Command) -> None:
    assert command("list", tmp_path) == (0, f"no checkpoints below {tmp_path}\n")
    code, text = command("list", tmp_path / "nowhere")
    assert (code, "is no directory" in text) == (2, True)


def test_inspect(runs: Path, command: Command) -> None:
    code, text = command("inspect", runs / "checkpoints/3")
    assert code == 0
    for part in (
        "progress: epoch=3",
        "hparams: width=4",
        "strategy=single",
        "weights and buffers: 9 tensors",
        "model.0.weight  float32  4x3",
        "count           int64    scalar",
        "0/tied.bias/exp_avg",
        "optimizer 0: 5 parameters, lr=0.01",
    ):
        assert part in text, part
    code, text = command("inspect", runs / "checkpoints/3", "--json")
    found = json.loads(text)
    assert found["tensors"]["module/model.0.weight"] == {"dtype": "float32", "shape": [4, 3], "size": 48, "parts": 1}
    assert found["hparams"] == {"width": 4}


def test_inspect_reads_no_tensor(runs: Path, command: Command) -> None:
    path = runs / "checkpoints/3"
    shard = next((path / "tensors").glob("*.distcp"))
    rewrite(path, f"tensors/{shard.name}", lambda data: data.__setitem__(slice(None), b"\0" * len(data)))
    assert command("inspect", path)[0] == 0


@pytest.mark.parametrize("name", ["list", "inspect", "verify", "consolidate", "diff", "convert"])
def test_what_is_no_checkpoint_is_refused(name: str, runs: Path, command: Command) -> None:
    more = {"diff": [runs], "consolidate": ["-o", runs / "a"], "convert": ["-o", runs / "a"]}.get(name, [])
    code, text = command(name, runs / "nowhere", *more)
    assert code == 2
    assert "nowhere" in text
    if name not in ("list", "convert"):
        code, text = command(name, runs, *more)
        assert (code, f"see `trivet checkpoint list {runs}`" in text) == (2, True)


def test_help_is_fast_and_loads_no_torch(runs: Path) -> None:
    """Nor do `list` of what no run has written the books of, and `verify`."""
    code = """
import sys
from trivet.commands.entry import run
for args in (["verify", sys.argv[1]], ["--help"]):
    try:
        assert run(["checkpoint", *args], prog="trivet")[0] == 0
    except SystemExit as end:
        assert not end.code
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, runs / "checkpoints/1"], check=True, capture_output=True)


def test_the_tools_do_without_distributed_checkpoint(runs: Path) -> None:
    code = """
import sys
from trivet.commands.entry import run
path, output = sys.argv[1:]
for args in (["inspect", path], ["consolidate", path, "-o", output], ["diff", path, path]):
    assert run(["checkpoint", *args], prog="trivet")[0] == 0
assert "torch.distributed.checkpoint" not in sys.modules
"""
    words = [sys.executable, "-c", code, str(runs / "checkpoints/1"), str(runs / "a")]
    subprocess.run(words, check=True, capture_output=True)


# ------------------------------------------------------------------------------------------------------------- verify


def test_verify(runs: Path, command: Command) -> None:
    paths = [runs / f"checkpoints/{n}" for n in (1, 2, 3)]
    code, text = command("verify", *paths)
    assert (code, text.count("ok ")) == (0, 3)
    shard = next((paths[1] / "tensors").glob("*.distcp")).name
    rewrite(paths[1], f"tensors/{shard}", lambda data: data.__setitem__(len(data) // 3, data[len(data) // 3] ^ 8))
    code, text = command("verify", *paths)
    assert (code, text.count("ok ")) == (1, 2)
    assert f"BAD  {paths[1]}: tensors/{shard} is damaged: its crc32 is" in text


def test_verify_names_every_kind_of_damage(runs: Path, command: Command) -> None:
    path = runs / "checkpoints/1"
    (path / "state.pt").unlink()
    rewrite(path, "tensors/.metadata", lambda data: data.extend(b"more"))
    (path / "tensors/__5_0.distcp").touch()
    code, text = command("verify", path)
    assert code == 1
    for reason in ("state.pt is missing", ".metadata has", "__5_0.distcp is not in the manifest"):
        assert reason in text
    (path / "manifest.json").unlink()
    code, text = command("verify", path)
    assert (code, "it has no manifest.json" in text) == (1, True)


def test_verify_without_checksums(runs: Path, command: Command) -> None:
    """A checkpoint of before there were any."""
    file = runs / "checkpoints/1/manifest.json"
    values = json.loads(file.read_text())
    for entry in values["files"].values():
        del entry["crc32"]
    file.write_text(json.dumps(values))
    code, text = command("verify", file.parent)
    assert (code, "3 without a checksum, by size only" in text) == (0, True)


# -------------------------------------------------------------------------------------------------------- consolidate


def test_consolidate_gives_what_a_plain_module_loads(
    runs: Path, trained: tuple[Path, Net], tmp_path: Path, command: Command
) -> None:
    output = tmp_path / "weights.safetensors"
    code, text = command("consolidate", runs / "checkpoints/3", "-o", output)
    assert (code, "9 tensors" in text) == (0, True)
    module = Net()
    module.load_state_dict(load_file(output), strict=True)
    for name, tensor in trained[1].state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name]), name


def test_consolidate_a_part_in_another_dtype(runs: Path, tmp_path: Path, command: Command) -> None:
    output = tmp_path / "part.safetensors"
    code, text = command("consolidate", runs / "checkpoints/3", "-o", output, "--prefix", "model.", "--dtype", "bf16")
    assert code == 0
    assert "left out: count, tied.weight, tied.bias, frozen.weight, frozen.bias" in text
    found = load_file(output)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).load_state_dict(found, strict=True)


def test_consolidate_refuses(runs: Path, tmp_path: Path, command: Command) -> None:
    path = runs / "checkpoints/3"
    for args, reason in (
        (["--prefix", "net."], "no weight's name begins with 'net.'; they begin with 'frozen.', 'model.', 'tied.'"),
        (["--dtype", "int8"], "'int8' is no floating-point dtype"),
    ):
        code, text = command("consolidate", path, "-o", tmp_path / "a", *args)
        assert (code, reason in text) == (2, True), text
    (tmp_path / "a").touch()
    code, text = command("consolidate", path, "-o", tmp_path / "a")
    assert (code, "exists" in text) == (2, True)


# --------------------------------------------------------------------------------------------------------------- diff


def test_diff(runs: Path, command: Command) -> None:
    one, other = runs / "checkpoints/1", runs / "checkpoints/3"
    assert command("diff", one, one) == (0, "")
    code, text = command("diff", one, other)
    assert code == 1
    for part in ("module/model.0.weight", "largest difference", "progress.epoch", "1 | 3"):
        assert part in text
    assert "frozen" not in text
    assert "seconds" not in text


def test_diff_of_other_shapes_names_dtypes_and_hparams(tmp_path: Path, command: Command) -> None:
    a = TrainState(module={"w": torch.ones(2), "x": torch.ones(2), "n": torch.tensor(float("nan"))}, hparams={"lr": 1})
    b = TrainState(
        module={"w": torch.ones(3), "y": torch.ones(2), "n": torch.tensor(float("nan"), dtype=torch.float64)},
        hparams={"lr": 2},
        optimizers=[{"state": {"w": {"exp_avg": torch.ones(3)}}, "groups": []}],
    )
    for name, state in (("a", a), ("b", b)):
        directory.write(tmp_path / name, state, rank=0, world_size=1)
    code, text = command("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    words = " ".join(text.split())
    for part in (
        "module/n float32 | float64 module/w shape (2,) | (3,)",
        "module/x only in A module/y only in B",
        "optimizer/0/w/exp_avg only in B",
        "hparams.lr 1 | 2",
    ):
        assert part in words, words


# ------------------------------------------------------------------------------------------------- load_from_checkpoint


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x.ckpt", "trivet checkpoint convert .*x.ckpt.* -o NEW"),
        ("x.safetensors", "a file of weights alone. .*load_file"),
        ("manifest.json", "it is a part of the checkpoint"),
    ],
)
def test_a_file_is_no_checkpoint_and_the_error_says_what_to_do(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=reason):
        Net.load_from_checkpoint(tmp_path / name)


def test_load_from_checkpoint(runs: Path, trained: tuple[Path, Net]) -> None:
    found = Net.load_from_checkpoint(runs / "checkpoints/3")
    assert all(torch.equal(t, found.state_dict()[name]) for name, t in trained[1].state_dict().items())
