"""Trains GPT-2 with this package's strategy and with stock DeepSpeed, and times the parts of each step."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpt2 import GPT2, VOCAB
from torch import nn

SUB_GROUP = BUCKET = 20_000_000
WARMUP = 2
PARTS = ("forward", "backward", "update")

Batches = Callable[[int], torch.Tensor]
Build = Callable[[], nn.Module]


class Probe:
    """Records clock times during training steps.

    Args:
        synchronize: Function called before the clock is read; it waits until a device has done its work.
    """

    def __init__(self, synchronize: Callable[[], object] = lambda: None) -> None:
        self.steps: list[dict[str, float]] = []
        self._marks: list[float] = []
        self._synchronize = synchronize

    def begin(self) -> None:
        """Begin a step."""
        self._marks.clear()
        self.mark()

    def mark(self) -> None:
        """End a part of the step."""
        self._synchronize()
        self._marks.append(time.perf_counter())

    def end(self) -> None:
        """End the step."""
        self.mark()
        parts = [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
        self.steps.append(dict(zip(PARTS, parts, strict=True)))

    def medians(self) -> dict[str, float]:
        """Return the median seconds of the parts of a step and of all of it, after the warm-up."""
        measured = self.steps[WARMUP:]
        parts = {part: statistics.median(step[part] for step in measured) for part in PARTS}
        return {**parts, "total": statistics.median(sum(step.values()) for step in measured)}


def tokens(step: int, size: str, shape: tuple[int, int]) -> torch.Tensor:
    """Return the tokens of a step, the same for every system."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB if size != "tiny" else 512, shape, generator=generator)


def lightning_module(size: str, steps: int, probe: Probe, batches: Batches, build: Build | None = None) -> Any:
    """Return the model as a LightningModule whose hooks mark the parts of a step; only this imports Lightning.

    With ``build``, that model is trained in place of GPT-2, and is partitioned while it is built.
    """
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2(size) if build is None else None

        def configure_model(self) -> None:
            if self.model is None and build is not None:
                self.model = build()

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.model(tokens)

        def training_step(self, _: torch.Tensor, index: int) -> torch.Tensor:
            probe.begin()
            return self.model(batches(index))

        def on_before_backward(self, loss: torch.Tensor) -> None:
            probe.mark()

        def on_after_backward(self) -> None:
            probe.mark()

        def on_train_batch_end(self, *_: Any) -> None:
            probe.end()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.zeros(steps, 1), batch_size=1)

    return Module()


def quiet_trainer(folder: str | Path, strategy: Any, **settings: Any) -> Any:
    """Return a Trainer on one device that prints and writes nothing of its own; bf16-mixed unless told otherwise."""
    import lightning.pytorch as pl

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    common = {"accelerator": "cpu", "devices": 1, "precision": "bf16-mixed", **dict.fromkeys(quiet, False)}
    return pl.Trainer(strategy=strategy, default_root_dir=folder, **{**common, **settings})


def train_with_package(
    size: str,
    steps: int,
    folder: str,
    *,
    accelerator: str,
    probe: Probe,
    batches: Batches,
    clip: float | None = None,
    precision: str = "bf16-mixed",
    build: Build | None = None,
    settings: dict[str, Any] | None = None,
    callbacks: Sequence[Any] = (),
    **zero: Any,
) -> Any:
    """Train with this package, through Lightning's Trainer; return the strategy.

    Args:
        size: One of ``gpt2.SIZES``.
        steps: Number of steps.
        folder: Folder for the state and for Lightning.
        accelerator: The Trainer's accelerator.
        probe: Probe that takes the times.
        batches: Function that makes the tokens of a step.
        clip: Largest norm of the gradients; None means that they are not clipped.
        precision: The Trainer's precision.
        build: Function that builds another model than GPT-2, from tokens to the loss.
        settings: Further settings of the strategy. Without ``transfer``, all state is on storage.
        callbacks: Callbacks of the Trainer.
        **zero: Further keys of its ``zero``.
    """
    from lightning_smartinfinity import SmartInfinityStrategy

    strategy = SmartInfinityStrategy(
        folder,
        zero={"sub_group_size": SUB_GROUP, "reduce_bucket_size": BUCKET, **zero},
        **{"transfer": {"dram_cache_bytes": 0}, **(settings or {})},
    )
    common = {"accelerator": accelerator, "precision": precision, "gradient_clip_val": clip}
    trainer = quiet_trainer(folder, strategy, max_steps=steps, callbacks=list(callbacks), **common)
    trainer.fit(lightning_module(size, steps, probe, batches, build))
    return strategy


def train_stock(
    size: str,
    steps: int,
    config: dict[str, Any],
    *,
    probe: Probe,
    batches: Batches,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    build: Build | None = None,
) -> int:
    """Train with DeepSpeed, without Lightning; return the number of parameters.

    Args:
        size: One of ``gpt2.SIZES``.
        steps: Number of steps.
        config: DeepSpeed's configuration; this function completes its ``zero_optimization``.
        probe: Probe that takes the times.
        batches: Function that makes the tokens of a step.
        make_optimizer: Function of the parameters; None means DeepSpeed's own Adam for the CPU.
        build: Function that builds another model than GPT-2, from tokens to the loss; it is partitioned meanwhile.
    """
    os.environ |= {"LOCAL_SIZE": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29531")}
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from lightning_smartinfinity.zero3.setup.environment import forbid_jit_builds

    forbid_jit_builds()
    section = {"stage": 3, "sub_group_size": SUB_GROUP, "reduce_bucket_size": BUCKET, **config["zero_optimization"]}
    config = {"gradient_clipping": 0.0, "bf16": {"enabled": True}, **config, "zero_optimization": section}
    if build is None:
        model: nn.Module = GPT2(size)
    else:
        deepspeed.init_distributed()
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = build()
    optimizer = (make_optimizer or partial(DeepSpeedCPUAdam, lr=1e-4))(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(steps):
        probe.begin()
        loss = engine(batches(step))
        probe.mark()
        engine.backward(loss)
        probe.mark()
        engine.step()
        probe.end()
    return sum(param.ds_numel for param in model.parameters())
