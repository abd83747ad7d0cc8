"""A small GPT that learns to write Python's reference manual, one character after the other.

The text is the standard library's own (`pydoc_data.topics`), so nothing is downloaded.

python char_lm.py fit --strategy ddp --devices 2
python char_lm.py predict --ckpt_path trivet_runs/version_0/checkpoints/...
"""

import math
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
import trivet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

TEXT = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace").decode()
ALPHABET = sorted(set(TEXT))
CODES = {character: code for code, character in enumerate(ALPHABET)}


class Block(nn.Module):
    """A layer of the transformer (Vaswani et al. 2017), normalised before each half."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class CharLM(trivet.Module):
    """A decoder-only transformer over characters.

    Args:
        width: The size of a character's vector.
        layers: How many blocks.
        heads: How many heads attend in each block; they divide the width.
        context: How many characters it looks back.
        lr: The highest learning rate of AdamW.
        warmup: Updates until the learning rate is at its highest.
        sample: How many characters `predict_step` writes.
    """

    def __init__(
        self,
        width: int = 128,
        layers: int = 3,
        heads: int = 4,
        context: int = 64,
        lr: float = 3e-3,
        warmup: int = 50,
        sample: int = 300,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET))
        self.apply(small)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.characters(codes) + self.positions.weight[: codes.shape[1]]
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), prog_bar=True)

    def loss(self, batch: Tensor) -> Tensor:
        """Nats per character."""
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.98), weight_decay=0.1)
        warmup, total = self.hparams.warmup, self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, warmup, total))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def predict_step(self, batch: Tensor, batch_idx: int) -> list[str]:
        """Go on after each prompt, drawing character by character, and print the text."""
        codes = batch
        for _ in range(self.hparams.sample):
            logits = self(codes[:, -self.hparams.context :])[:, -1] / 0.7  # below 1: rather what is likely
            codes = torch.cat([codes, torch.multinomial(logits.softmax(-1), 1)], 1)
        texts = ["".join(ALPHABET[code] for code in row) for row in codes.tolist()]
        self.print("\n".join(texts))
        return texts


def small(layer: nn.Module) -> None:
    """Start with small weights, as GPT-2 does."""
    if isinstance(layer, (nn.Linear, nn.Embedding)):
        nn.init.normal_(layer.weight, std=0.02)


def rate(step: int, warmup: int, total: float) -> float:
    """The learning rate's share of its highest: up in a line, then down along a cosine to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup)))


def encode(text: str) -> Tensor:
    """A text as the numbers of its characters."""
    return torch.tensor([CODES[character] for character in text])


class Pieces(Dataset[Tensor]):
    """Pieces of a text, ``size`` characters and the next one each."""

    def __init__(self, text: str, starts: Sequence[int], size: int) -> None:
        self.codes = encode(text)
        self.starts, self.size = starts, size

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self.starts[index]
        return self.codes[start : start + self.size + 1]


class Prompts(Dataset[Tensor]):
    """Beginnings of texts, of any lengths."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        return encode(self.texts[index])


class Topics(trivet.DataModule):
    """The manual: its first nine tenths for training, the rest for validation.

    Args:
        batch_size: Pieces in a batch.
        context: Characters in a piece.
        prompts: What `predict` goes on after.
    """

    def __init__(self, batch_size: int = 32, context: int = 64, prompts: Sequence[str] = ("The ", "A class ")) -> None:
        super().__init__()
        self.batch_size, self.context, self.prompts = batch_size, context, prompts

    def setup(self, stage: str) -> None:
        cut, size = len(TEXT) * 9 // 10, self.context
        self.train = Pieces(TEXT[:cut], range(0, cut - size - 1, size // 8), size)  # they overlap
        self.val = Pieces(TEXT[cut:], range(0, len(TEXT) - cut - size - 1, size), size)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.val, 128)

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Prompts(self.prompts), 1)


if __name__ == "__main__":
    trivet.cli(CharLM, Topics, trainer_defaults={"max_steps": 600, "val_check_interval": 200})
