"""What `trivet checkpoint consolidate` writes, loaded by a plain model of Hugging Face's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.checkpoint.consolidate import consolidate

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.filterwarnings("ignore"),
]


def make_model() -> Any:
    """Tiny, with the output layer tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2))


class Net(trivet.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.extra = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch[0], labels=batch[0]).loss + self.extra.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_a_plain_model_loads_it_strictly(tmp_path: Path) -> None:
    module = Net()
    trainer = trivet.Trainer(
        accelerator="cpu", strategy="single", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(32).view(4, 8) % 11), 2))
    trainer.save_checkpoint(tmp_path / "one")
    found = consolidate(tmp_path / "one", tmp_path / "hf/model.safetensors", prefix="model.")
    assert found.left_out == ("extra.weight", "extra.bias")
    model = make_model()
    model.load_state_dict(load_file(tmp_path / "hf/model.safetensors"), strict=True)
    model.config.save_pretrained(tmp_path / "hf")
    loaded, told = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in module.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
