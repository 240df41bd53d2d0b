"""Trains small models on cards and on the host, for ``smart-infinity card-report``."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_smartinfinity.integrations.trainer.strategy import SmartInfinityStrategy
from lightning_smartinfinity.settings import SmartSSDConfig, TransferConfig
from lightning_smartinfinity.storage.jobs.jobs import find_job
from lightning_smartinfinity.storage.jobs.removal import remove_job

__all__ = ["compare_trainings"]

_STEPS = 20
_WIDTHS = (256, 1024, 2048)
_BATCH = 4
_JOB = "smart-infinity-card-report"
# Logger of the warning that the host has finished a card's work.
_TAKES_OVER = "lightning_smartinfinity.devices.smartssd.device"


class _Layer(pl.LightningModule):
    """A square linear layer that learns the identity.

    Args:
        width: Length of the vectors.
        optimizer: Class name of the optimizer in torch.optim.

    Attributes:
        arrays: Arrays of the optimizer state at the end of training, by name.
    """

    def __init__(self, width: int, optimizer: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(width, width, bias=False)
        self._width, self._optimizer = width, optimizer
        self.arrays: dict[str, Any] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(batch_idx)
        vectors = torch.randn(_BATCH, self._width, generator=generator).to(self.device)
        loss: torch.Tensor = (self.layer(vectors) - vectors).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self._optimizer)(self.parameters(), lr=1e-3)
        return optimizer

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.arange(_STEPS))  # type: ignore[arg-type]

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, SmartInfinityStrategy)
        strategy.drain()
        assert strategy._training_optimizer is not None
        self.arrays = strategy._training_optimizer.rank_state.handler.state.read_parameter(0)


def compare_trainings(folders: list[str], settings: SmartSSDConfig, *, optimizer: str) -> dict[str, Any]:
    """Train layers of several sizes for twenty steps on the cards and on the host, and compare every bit of the state.

    The result is also a failure if the host had to finish a card's work.

    Args:
        folders: Storage folders on the SSDs of the cards.
        settings: The settings of the cards.
        optimizer: Class name of an optimizer in torch.optim that has a kernel.

    Raises:
        SmartInfinityError: A training failed.
    """
    for job in filter(None, (find_job(Path(folder), _JOB) for folder in folders)):  # left by an interrupted run
        remove_job(job, kept=True)
    transfer = TransferConfig(job=_JOB)
    rates, different = [], []
    failures: list[str] = []
    for width in _WIDTHS:
        on_cards = SmartInfinityStrategy(folders, update_device="smartssd", smartssd=settings, transfer=transfer)
        with _taken_over(failures):
            cards, traffic = _trained(width, optimizer, on_cards)
        on_host = SmartInfinityStrategy(folders[0], update_device="host", transfer=transfer)
        host, _ = _trained(width, optimizer, on_host)
        numel = width * width
        different += [f"{name} of {numel} elements" for name in host if cards[name].tobytes() != host[name].tobytes()]
        rates.append({"numel": numel, "rate": traffic.numel / max(traffic.kernel_seconds, 1e-9)})
    found = {"steps": _STEPS, "optimizer": optimizer, "elements_per_second": rates}
    if failures:  # the host computes the same bits, so the comparison does not show this
        return {"status": "failed", "reason": " ".join(failures), **found}
    if different:
        reason = f"after {_STEPS} steps the cards' state differs from the host's: {', '.join(different)}"
        return {"status": "failed", "reason": reason, **found}
    return {"status": "done", **found}


@contextmanager
def _taken_over(failures: list[str]) -> Iterator[None]:
    """Collect the warnings that the host has finished a card's work in a list, within this context."""

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            failures.append(record.getMessage())

    logger, handler = logging.getLogger(_TAKES_OVER), Noted(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _trained(width: int, optimizer: str, strategy: SmartInfinityStrategy) -> tuple[dict[str, Any], Any]:
    """Train a layer; return its state and the counters of the training."""
    module = _Layer(width, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            strategy=strategy,
            devices=1,
            precision="32-true",
            max_steps=_STEPS,
            default_root_dir=Path(folder),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            trainer.fit(module)
            traffic = strategy.traffic()
        except SystemExit as ended:  # Lightning exits with this after Ctrl-C
            raise KeyboardInterrupt from ended
        finally:
            strategy.close()
    return module.arrays, traffic
