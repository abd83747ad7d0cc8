"""Lightning's names, for code that was written for Lightning 2: ``from trivet.compat import lightning as L``.

Every name is Trivet's own thing under Lightning's spelling, or a small subclass of it; Lightning need not be installed.
Names that have no counterpart raise ImportError, saying what to use instead. ``python -m trivet.compat.lightning
train.py ...`` runs a script as it is, with its ``import lightning`` or ``import pytorch_lightning`` led here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import facade

if TYPE_CHECKING:
    from ...callbacks.callback import Callback as Callback
    from .datamodule import LightningDataModule as LightningDataModule
    from .module import LightningModule as LightningModule
    from .plugins import seed_everything as seed_everything
    from .trainer import Trainer as Trainer

    pytorch: Any

__version__ = "2.6.6"  # the Lightning whose words these are

facade.install()


def __getattr__(name: str) -> Any:
    return facade.find("", name)


def __dir__() -> list[str]:
    return facade.known("")
