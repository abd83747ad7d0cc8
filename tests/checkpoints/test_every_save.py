"""Each checkpoint of a run is one to go on from exactly, also those that are written while an epoch is being ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
from chosen import count
from full import FULL
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from trivet.callbacks import EarlyStopping
from trivet.checkpoint import directory
from trivet.data.combined import CombinedLoader
from trivet.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it

DATA = TensorDataset(torch.linspace(-1, 1, 44).reshape(11, 4))
SHORT = TensorDataset(torch.linspace(0, 1, 3).reshape(3, 1))


class Net(trivet.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Linear(5, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        shift = 0.0
        if isinstance(batch, dict):
            shift, batch = 0.0 if batch["short"] is None else batch["short"][0].mean(), batch["long"]
        loss: Tensor = (self.net(batch[0]) - shift).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=2)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        plateau = ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.9)
        return [optimizer], [{"scheduler": plateau, "monitor": "val"}]


LOADERS = {
    "by index": lambda: DataLoader(DATA, 2, shuffle=True),
    "stateful": lambda: StatefulDataLoader(DATA, 2, shuffle=True),
    "a list": lambda: list(DataLoader(DATA, 2)),
    "combined": lambda: CombinedLoader(
        {"long": DataLoader(DATA, 2, shuffle=True), "short": DataLoader(SHORT, 1)}, mode="max_size"
    ),
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in LOADERS},
    "accumulated": ("by index", {"accumulate_grad_batches": 4}),
    "validated within the epoch": ("by index", {"val_check_interval": 4}),
    "validated every second epoch": ("by index", {"check_val_every_n_epoch": 2}),
}


def fit(kind: str, place: Path, ckpt_path: Path | None = None) -> tuple[trivet.Trainer, list[Tensor], Any]:
    name, options = KINDS[kind]
    module = Net()
    saves = trivet.Checkpoint(place, every_n_updates=1, every_n_epochs=1, save_top_k=-1)
    stop = EarlyStopping("val", patience=4, check_on_train_epoch_end=True, strict=False)
    trainer = trivet.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, callbacks=[saves, stop], exact_resume=True,
        enable_progress_bar=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    if "second" in kind:
        module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), lr=0.01)  # type: ignore[method-assign]
    trainer.fit(module, LOADERS[name](), DataLoader(DATA, 11), ckpt_path=ckpt_path)
    books = [stop.state_dict(), [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs]]
    return trainer, [tensor.clone() for tensor in module.state_dict().values()], books


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_exactly_from_each_of_its_checkpoints(kind: str, tmp_path: Path) -> None:
    """With TRIVET_CI_FULL=1 each; else of each kind those of an epoch's end and two within, of the first kind all."""
    trainer, weights, books = fit(kind, tmp_path / "whole")
    saved = {path: directory.manifest(path) for path in (tmp_path / "whole").iterdir() if path.is_dir()}
    ending = [m for m in saved.values() if m["progress"]["scheduled"]]  # written by a validation at an epoch's end
    assert bool(ending) == ("within" not in kind and kind != "stateful")  # which tells its end too late
    within = [path for path, m in saved.items() if m["progress"]["epoch"] == 1 and m not in ending]
    within.sort(key=lambda path: saved[path]["progress"]["update"])
    few = within if FULL or kind == "by index" else [within[0], within[len(within) // 2]]
    count("checkpoints to go on from", len(few) + len(ending), len(within) + len(ending))
    for path in [*few, *(path for path, m in saved.items() if m in ending)]:
        resumed, found, found_books = fit(kind, tmp_path / f"after {path.name}", path)
        assert all(map(torch.equal, weights, found)), path.name
        assert found_books == books, path.name
        assert resumed.progress.update == trainer.progress.update
        assert resumed.callback_metrics["val"] == trainer.callback_metrics["val"]


def test_a_value_of_the_validation_before_is_no_checkpoints_own(tmp_path: Path) -> None:
    fit("validated every second epoch", tmp_path / "whole")
    begin = tmp_path / "whole" / "epoch=1-update=12"
    assert "val" in directory.manifest(begin)["metrics"]
    fit("validated every second epoch", tmp_path / "after", begin)
    assert all("val" not in directory.manifest(path)["metrics"] for path in (tmp_path / "after").glob("epoch*"))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_end"])
def test_within_an_update_nothing_is_saved(hook: str, asynchronous: bool, tmp_path: Path) -> None:
    module = Net()

    def save(*args: Any) -> None:
        name = "save_checkpoint_async" if asynchronous else "save_checkpoint"
        getattr(module.trainer, name)(tmp_path / str(args[-1]))

    setattr(module, hook, save)
    trainer = trivet.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, accumulate_grad_batches=2, enable_progress_bar=False,
        enable_checkpointing=False,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="within an update: a run that goes on from there would miss"):
        trainer.fit(module, DataLoader(DATA, 2))
    assert not list(tmp_path.iterdir())
