"""Runtime: a plain PyTorch loop with five changed lines, over the same plugins."""

import pathlib
import time

import pytest
import torch
import trivet
from ranks import run
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from trivet.checkpoint import directory
from trivet.errors import CheckpointError, ConfigurationError, PlanError, RankFailed

SAMPLES, BATCH = 16, 2
FP16 = {"name": "fp16-mixed", "initial": 1024.0}  # the default scale does not fit into a float16 gradient of 1


def data():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SAMPLES, 3, generator=generator), torch.randn(SAMPLES, 1, generator=generator)
    return TensorDataset(x, y)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def plain_loop(batch_size, *, clip=None):
    model = net().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for x, y in DataLoader(data(), batch_size):
        optimizer.zero_grad()
        mse_loss(model(x.double()), y.double()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


def loop(runtime):  # 1
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = runtime.setup(model, optimizer)  # 2
    for x, y in runtime.setup_dataloader(DataLoader(data(), BATCH)):  # 3
        optimizer.zero_grad()
        runtime.backward(mse_loss(model(x.double()), y.double()))  # 4
        optimizer.step()
    return model.state_dict()


def accumulating(runtime, every, clip):
    model = net()
    model, optimizer = runtime.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))
    for index, (x, y) in enumerate(runtime.setup_dataloader(DataLoader(data(), BATCH)), 1):
        if index % every:
            with runtime.no_sync():
                runtime.backward(mse_loss(model(x.double()), y.double()) / every)
            continue
        runtime.backward(mse_loss(model(x.double()), y.double()) / every)
        if clip is not None:
            runtime.clip(optimizer, clip)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def launch(function, *args, **options):
    options = {"accelerator": "cpu", "precision": "fp64"} | options
    return trivet.Runtime(**options).launch(function, *args)


def close(one, other, atol=1e-12):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=atol)


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_equals_the_plain_loop(world_size):
    """With two ranks each batch of the plain loop is the ranks' batches together."""
    for weights in run(world_size, launch, loop):
        close(weights, plain_loop(BATCH * world_size))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulation_and_clipping(world_size, clip):
    for weights in run(world_size, launch, accumulating, 2, clip):
        close(weights, plain_loop(BATCH * world_size * 2, clip=clip), atol=1e-6 if clip else 1e-12)


def test_it_starts_processes_itself():
    close(launch(loop, devices=2), plain_loop(BATCH * 2))


def hanging(runtime):
    model = net().double()
    model, optimizer = runtime.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for index, (x, y) in enumerate(runtime.setup_dataloader(DataLoader(data(), BATCH))):
        if index == 2 and runtime.world.rank == 1:
            time.sleep(60)
        runtime.backward(mse_loss(model(x.double()), y.double()))
        optimizer.step()


def test_a_rank_that_hangs_ends_the_run():
    with pytest.raises(RankFailed, match=r"nothing happened .*: rank 1 is at .*in hanging \(update 2, batch 3\)"):
        launch(hanging, devices=2, timeout="2 s")


def overflow(runtime):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = runtime.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    applied = []
    for value in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        runtime.backward(model(torch.full((1, 1), value if runtime.world.rank == 0 else 1.0)).float().sum())
        applied.append(optimizer.step().applied)
    return applied, model.module.weight.item(), runtime.gather(torch.tensor(float(runtime.world.rank))).tolist()


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_overflow_is_skipped_on_all_ranks(world_size):
    for applied, weight, gathered in run(world_size, lambda: launch(overflow, precision=FP16)):
        assert applied == [True, False, True]
        assert weight == -2.0
        assert gathered == list(range(world_size))


def first_half(runtime, path):
    model = net()
    model, optimizer = runtime.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))
    for index, (x, y) in enumerate(runtime.setup_dataloader(DataLoader(data(), BATCH)), 1):
        optimizer.zero_grad()
        runtime.backward(mse_loss(model(x.double()), y.double()))
        optimizer.step()
        if index == 2:
            runtime.save(path, index=index, note={"lr": 0.1})
    return model.state_dict()


def second_half(runtime, path):
    model = net()
    model, optimizer = runtime.setup(model, torch.optim.Adam(model.parameters(), lr=0.5))
    user = runtime.load(path)
    assert user == {"index": 2, "note": {"lr": 0.1}}
    for index, (x, y) in enumerate(runtime.setup_dataloader(DataLoader(data(), BATCH)), 1):
        if index > user["index"]:
            optimizer.zero_grad()
            runtime.backward(mse_loss(model(x.double()), y.double()))
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("world_size", [1, 2])
def test_save_and_load(tmp_path, world_size):
    path = tmp_path / "half"
    for whole, resumed in run(world_size, lambda: (launch(first_half, path), launch(second_half, path))):
        close(whole, resumed, atol=0)


def save_behind(runtime, path):
    model, optimizer = runtime.setup(*(lambda m: (m, torch.optim.Adam(m.parameters())))(net()))
    saving = runtime.save_async(path, note=3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    runtime.backward(model(torch.ones(1, 3).double()).sum())
    optimizer.step()
    saving.wait()
    stored = directory.read_weights(path)
    assert runtime.load(path) == {"note": 3}
    assert all(torch.equal(stored[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items())
    runtime.save_async(pathlib.Path(__file__) / "below a file")  # nobody waits for it, but the end of launch


@pytest.mark.parametrize("where", ["memory://runtime/saved", "saved"])
def test_save_behind_the_loop(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*below a file"):
        launch(save_behind, where)
    with pytest.raises(ConfigurationError, match=r"runtime\.save_async\(path"):
        launch(lambda runtime: (runtime.setup(net()), runtime.save(where, save_async=True)))


def test_evaluation_and_modes():
    def function(runtime):
        model = runtime.setup(nn.Sequential(nn.Dropout(0.9), nn.Linear(3, 1)))
        model.eval()
        with torch.no_grad():
            one, other = model(torch.ones(1, 3).double()), model(torch.ones(1, 3).double())
        return torch.equal(one, other), model.module.training, len(list(model.parameters()))

    assert launch(function) == (True, False, 2)


def test_what_is_wrong_is_said():
    with pytest.raises(PlanError, match="strategy 'single'"):
        trivet.Runtime(accelerator="cpu", strategy="single", devices=2)
    runtime = trivet.Runtime(accelerator="cpu")
    with pytest.raises(ConfigurationError, match=r"only inside the function that runtime\.launch\(function\) calls"):
        runtime.setup(net())
    with pytest.raises(ConfigurationError, match=r"call runtime\.setup\(module, \.\.\.\) first"):
        runtime.launch(lambda runtime: runtime.backward(torch.zeros(())))
    with pytest.raises(ConfigurationError, match=r"setup was called twice"):
        runtime.launch(lambda runtime: (runtime.setup(net()), runtime.setup(net())))
