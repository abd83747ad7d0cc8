"""WeightAveraging, EMA and SWA: what is averaged, what validation sees, what checkpoints hold, under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
from callback_runs import Net, loader, trainer
from ranks import run
from torch import Tensor
from trivet.callbacks import Checkpoint, EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from trivet.checkpoint import directory
from trivet.errors import CheckpointError, ConfigurationError


class Watch(trivet.Callback):
    """Whole weights after each update, and what each validation saw. Comes after the averaging callback."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.validated: list[Tensor] = []

    def on_update_end(self, trainer: Any, module: Any) -> None:
        self.weights.append(flat(trainer, module))

    def on_validation_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(flat(trainer, module))


def flat(trainer: Any, module: Any) -> Tensor:
    tensors = trainer.strategy.state_dict(module)
    return torch.cat([trainer.strategy.whole(tensor).detach().reshape(-1).clone() for tensor in tensors.values()])


def final(module: torch.nn.Module) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in module.state_dict().values()])


def fit(root: Any, averaging: WeightAveraging, ckpt: str | None = None, **flags: Any) -> tuple[Tensor, Watch, Any]:
    torch.manual_seed(3)
    net, watch = Net(), Watch()
    saver = Checkpoint(Path(root) / "ck", every_n_updates=5, save_top_k=-1, filename="{update}")
    made = trainer(root, averaging, watch, saver, **{"max_epochs": 2, **flags})
    made.fit(net, loader(), loader(8), ckpt_path=ckpt)
    return final(net), watch, made


def of_ema(root: Any, strategy: str, precision: str) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    averaging = EMAWeightAveraging(decay=0.5)
    last, watch, _ = fit(root, averaging, strategy=strategy, precision=precision)
    return last, watch.weights, watch.validated


@pytest.mark.parametrize(
    ("strategy", "precision", "ranks"),
    [
        ("single", "fp32", 1),
        ("single", "bf16-true", 1),
        ("ddp", "fp32", 2),
        ("fsdp", "fp32", 2),
        ("zero1", "fp32", 2),
        ("zero3", "fp32", 2),
    ],
)
def test_a_moving_average_of_the_weights(tmp_path: Path, strategy: str, precision: str, ranks: int) -> None:
    for last, weights, validated in run(ranks, of_ema, tmp_path, strategy, precision):
        expected, after_epochs = weights[0].float(), []
        for index, current in enumerate(weights):
            if index:
                expected = torch.lerp(expected, current.float(), 0.5)
            if index % 8 == 7 or (ranks == 2 and index % 4 == 3):
                after_epochs.append(expected)
        tolerance = 1e-6 if precision == "fp32" else 0.02
        torch.testing.assert_close(last.float(), after_epochs[-1], rtol=0, atol=tolerance)
        torch.testing.assert_close(validated[-1].float(), after_epochs[-1], rtol=0, atol=tolerance)
        assert not torch.equal(weights[-1], last)


def test_training_goes_on_with_the_weights_that_validation_did_not_see(tmp_path: Path) -> None:
    _, with_it, _ = fit(tmp_path / "a", EMAWeightAveraging())
    _, without, _ = fit(tmp_path / "b", EMAWeightAveraging(), limit_val_batches=0)
    for one, other in zip(with_it.weights, without.weights, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("averaging", [WeightAveraging, lambda: StochasticWeightAveraging(0.01, 1, 2)])
def test_the_mean_of_all_weights(tmp_path: Path, averaging: Any) -> None:
    last, watch, _ = fit(tmp_path, averaging(), max_epochs=4)
    seen = watch.weights if averaging is WeightAveraging else watch.weights[15::8]
    torch.testing.assert_close(last, torch.stack(seen).mean(0), rtol=0, atol=1e-6)


def test_a_function_of_the_users(tmp_path: Path) -> None:
    last, watch, _ = fit(tmp_path, WeightAveraging(avg_fn=lambda average, current, count: torch.max(average, current)))
    torch.testing.assert_close(last, torch.stack(watch.weights).amax(0))


def test_buffers(tmp_path: Path) -> None:
    for use_buffers in (True, False):
        net = Net()
        net.norm = torch.nn.BatchNorm1d(4)
        inner = net.net
        net.net = torch.nn.Sequential(net.norm, *inner)
        made = trainer(tmp_path / str(use_buffers), WeightAveraging(use_buffers=use_buffers), max_epochs=1)
        made.fit(net, loader())
        exact = torch.nn.BatchNorm1d(4)
        for batch in loader():
            exact(batch[0])
        assert torch.allclose(net.norm.running_mean, exact.running_mean) is not use_buffers
        assert net.norm.num_batches_tracked == 8


# ------------------------------------------------------------------------------------------------------- checkpoints


def resumed(root: Any, strategy: str) -> tuple[Any, Any, Any, Any]:
    root = Path(root)
    whole, watch, _ = fit(root / "whole", EMAWeightAveraging(decay=0.9), strategy=strategy)
    half = EMAWeightAveraging(decay=0.9)
    rest, again, _ = fit(root / "rest", half, ckpt=str(root / "whole" / "ck" / "5"), strategy=strategy)
    return whole, rest, watch.weights[-1], again.weights[-1]


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_resumed_it_ends_the_same_to_the_bit(tmp_path: Path, strategy: str, ranks: int) -> None:
    for whole, rest, weights, again in run(ranks, resumed, tmp_path, strategy):
        assert torch.equal(whole, rest)
        assert torch.equal(weights, again)


def test_a_checkpoint_holds_the_average_under_the_modules_names(tmp_path: Path) -> None:
    last, watch, _ = fit(tmp_path, EMAWeightAveraging(decay=0.5))
    stored, beside = directory.read_weights(tmp_path / "ck" / "16"), directory.read(tmp_path / "ck" / "16").beside
    names = list(Net().state_dict())
    torch.testing.assert_close(torch.cat([stored[name].reshape(-1) for name in names]), last)
    current = torch.cat([beside[f"averaging.current/{name}"].reshape(-1) for name in names])
    assert torch.equal(current, watch.weights[-1])
    assert list(stored) == names


def best_of(root: Any, strategy: str) -> tuple[float, float, float]:
    averaging, net = EMAWeightAveraging(decay=0.9), Net()
    saver = Checkpoint(Path(root) / "ck", monitor="val_loss")
    made = trainer(root, averaging, saver, strategy=strategy)
    made.fit(net, loader(), loader(8))
    (with_it,) = made.validate(net, loader(8), ckpt_path="best")
    plain = trainer(root, strategy=strategy)
    (without,) = plain.validate(Net(), loader(8), ckpt_path=saver.best_model_path)
    assert saver.best_model_score is not None
    return saver.best_model_score, with_it["val_loss"], without["val_loss"]


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_the_best_checkpoint_gives_its_score_again(tmp_path: Path, strategy: str, ranks: int) -> None:
    for score, with_it, without in run(ranks, best_of, tmp_path, strategy):
        assert score == pytest.approx(with_it, rel=1e-6)
        assert score == pytest.approx(without, rel=1e-6)


def test_training_does_not_go_on_from_an_average_unawares(tmp_path: Path) -> None:
    fit(tmp_path, EMAWeightAveraging())
    with pytest.raises(CheckpointError, match=r"kept by a callback that this run has not: 'averaging.current/net"):
        trainer(tmp_path).fit(Net(), loader(), ckpt_path=str(tmp_path / "ck" / "16"))


def test_a_checkpoint_without_an_average(tmp_path: Path) -> None:
    made = trainer(tmp_path, Checkpoint(tmp_path / "ck", filename="{update}"), max_epochs=1)
    made.fit(Net(), loader())
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: 'averaging.current/net"):
        fit(tmp_path, WeightAveraging(), ckpt=str(tmp_path / "ck" / "8"))


# ---------------------------------------------------------------------------------------------------------------- SWA


def test_the_rate_goes_to_its_own(tmp_path: Path) -> None:
    rates: list[float] = []

    class Rates(trivet.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    averaging = StochasticWeightAveraging(0.02, swa_epoch_start=0.5, annealing_epochs=2, annealing_strategy="linear")
    trainer(tmp_path, averaging, Rates(), max_epochs=6).fit(Net(), loader())
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.06, 0.02])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StochasticWeightAveraging(-1.0), "swa_lrs=-1.0"),
        (lambda: StochasticWeightAveraging(0.1, swa_epoch_start=1.5), "swa_epoch_start=1.5"),
        (lambda: StochasticWeightAveraging(0.1, annealing_strategy="exp"), "annealing_strategy='exp'"),
        (lambda: EMAWeightAveraging(decay=2.0), "decay=2.0"),
        (lambda: WeightAveraging(avg_fn=max, multi_avg_fn=max), "not both"),
    ],
)
def test_wrong_arguments(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_schedule_of_every_update_is_refused_beside_swa(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Use interval 'epoch'"):
        trainer(tmp_path, StochasticWeightAveraging(0.1)).fit(Net(schedule="step"), loader())


def test_when_it_is_updated() -> None:
    chosen = EMAWeightAveraging(update_every_n_steps=3, update_starting_at_step=4, update_starting_at_epoch=2)
    assert [step for step in range(10) if chosen.should_update(step_idx=step)] == [6, 9]
    assert [epoch for epoch in range(4) if chosen.should_update(epoch_idx=epoch)] == [2, 3]
    assert not WeightAveraging().should_update(epoch_idx=1)
