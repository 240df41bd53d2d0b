"""Prints a run as a table: the loss as it falls, the traffic, the memory, and a sample of text at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from byte_lm import ByteLM
from text_folder import TextFolder
from torch import Tensor

from lightning_smartinfinity import StorageTrafficMonitor

HEADER = "   step     loss  held-out   lr       tokens/s   read MB  written MB  waited s"
BAR_NATS = 6.0
BAR_WIDTH = 30


class Report(L.Callback):
    """Prints the table, and a summary after it, on the first rank.

    Args:
        every_n_steps: Optimizer steps per row.
        monitor: Where the traffic's numbers come from, if the strategy has any.
        prompt: What the sample begins with.
        sample_bytes: Length of the sample; 0 for none.
        temperature: Temperature of the sample; 0 takes the likeliest byte each time.
    """

    def __init__(
        self,
        *,
        every_n_steps: int,
        monitor: StorageTrafficMonitor | None = None,
        prompt: str = "def ",
        sample_bytes: int = 200,
        temperature: float = 0.8,
    ) -> None:
        self.every_n_steps = every_n_steps
        self.monitor = monitor
        self.prompt = prompt
        self.sample_bytes = sample_bytes
        self.temperature = temperature
        self.loss_sum: Tensor | None = None
        self.held_out: list[tuple[int, float]] = []
        self.has_trained = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        say(trainer, describe(trainer, pl_module))
        say(trainer, HEADER)
        self.has_trained = True
        self.first_step = self.row_step = trainer.global_step
        for step, loss in self.held_out:
            say(trainer, f"{step:7d}{'':9}{loss:10.3f}")
        self.began = self.row_began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning has divided the loss by the number of micro-batches in a step.
        loss = outputs["loss"].detach().float()
        self.loss_sum = loss if self.loss_sum is None else self.loss_sum + loss
        if trainer.global_step > self.row_step and trainer.global_step % self.every_n_steps == 0:
            self.print_row(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.pause_began = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.held_out.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))
        if not trainer.sanity_checking:
            pause = time.perf_counter() - self.pause_began
            self.began, self.row_began = self.began + pause, self.row_began + pause
            say(trainer, f"{trainer.global_step:7d}{'':9}{self.held_out[-1][1]:10.3f}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seconds = time.perf_counter() - self.began
        say(trainer, self.summarize(trainer, seconds))
        if self.sample_bytes:
            assert isinstance(pl_module, ByteLM)
            # Every rank calls it: a ZeRO-3 forward gathers parameters from all of them.
            text = pl_module.generate(self.prompt.encode(), self.sample_bytes, temperature=self.temperature)
            say(trainer, "\nsample\n" + printable(text))

    def print_row(self, trainer: L.Trainer) -> None:
        assert self.loss_sum is not None
        now, num_steps = time.perf_counter(), trainer.global_step - self.row_step
        loss = float(trainer.strategy.reduce(self.loss_sum / num_steps, reduce_op="mean"))
        speed = num_steps * bytes_per_step(trainer) / (now - self.row_began)
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        row = f"{trainer.global_step:7d}{loss:9.3f}{'':10}   {rate:<8.1e}{speed:9,.0f}"
        traffic = traffic_columns(trainer.callback_metrics) if self.monitor else f"{'-':>10}{'-':>12}{'-':>10}"
        say(trainer, f"{row}{traffic}  {'#' * round(BAR_WIDTH * min(1.0, loss / BAR_NATS))}")
        self.loss_sum, self.row_step, self.row_began = None, trainer.global_step, now

    def summarize(self, trainer: L.Trainer, seconds: float) -> str:
        num_steps = trainer.global_step - self.first_step
        speed = num_steps * bytes_per_step(trainer) / seconds
        lines = [f"\n{num_steps} steps in {seconds:.1f} s: {speed:,.0f} tokens/s (a token is a byte)"]
        if self.held_out:
            measured = [f"{loss:.3f} at step {step}" for step, loss in self.held_out]
            lines.append(f"held-out loss {measured[0]}, {measured[-1]} (nats per byte)")
        if self.monitor:
            lines += traffic_lines(self.monitor.summary)
        lines += memory_lines(trainer)
        return "\n".join(lines)


def say(trainer: L.Trainer, text: str) -> None:
    """Print on the first rank, without delay even into a pipe."""
    if trainer.is_global_zero:
        print(text, flush=True)


def describe(trainer: L.Trainer, module: L.LightningModule) -> str:
    """Return the description of the run that is about to begin."""
    # ZeRO-3 leaves a parameter's true size in ds_numel.
    num_parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())
    data = trainer.datamodule  # type: ignore[attr-defined]
    assert isinstance(data, TextFolder) and data.train_windows is not None and data.val_windows is not None
    return (
        f"model     {module.hparams['model_size']}, {num_parameters / 1e6:.1f} M parameters, {trainer.precision}\n"
        f"text      {data.folder}: {len(data.train_windows.bytes) / 1e6:.1f} MB to train on,"
        f" {len(data.val_windows.bytes) / 1e6:.1f} MB held out\n"
        f"strategy  {type(trainer.strategy).__name__}, {trainer.world_size} process(es) on"
        f" {type(trainer.accelerator).__name__.removesuffix('Accelerator')},"
        f" {bytes_per_step(trainer):,} bytes of text per step\n"
    )


def bytes_per_step(trainer: L.Trainer) -> int:
    """Return how many bytes of text an optimizer step learns from, over all ranks."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    assert isinstance(data, TextFolder)
    return data.batch_size * data.block_size * trainer.accumulate_grad_batches * trainer.world_size


def traffic_columns(metrics: dict[str, Tensor]) -> str:
    """Return a row's columns of traffic from the monitor's logged metrics."""
    read = 1e3 * float(metrics["io/shared_read_GB"] + metrics["io/internal_read_GB"])
    written = 1e3 * float(metrics["io/shared_write_GB"] + metrics["io/internal_write_GB"])
    return f"{read:10.1f}{written:12.1f}{float(metrics['io/wait_s']):10.3f}"


def traffic_lines(summary: dict[str, float]) -> list[str]:
    """Return the lines that sum up the optimizer state's traffic."""
    read = 1e3 * (summary["io/shared_read_GB"] + summary["io/internal_read_GB"])
    written = 1e3 * (summary["io/shared_write_GB"] + summary["io/internal_write_GB"])
    return [
        f"storage per step: {read:.1f} MB read, {written:.1f} MB written,"
        f" {summary['io/bytes_per_parameter']:.2f} bytes per parameter",
        f"storage waited for: {summary['io/wait_s']:.3f} s per step ({100 * summary['io/wait_share']:.0f} % of the"
        f" time), at {summary['io/wait_GBps']:.2f} GB/s",
        f"storage written in all: {1e3 * summary['io/written_TB']:.3f} GB",
    ]


def memory_lines(trainer: L.Trainer) -> list[str]:
    """Return the lines on the first rank's memory, and on the optimizer state that is not in it."""
    lines = [f"peak memory of the process: {peak_rss() / 2**20:,.0f} MiB"]
    if held := getattr(trainer.strategy, "host_bytes", None):
        parts = ", ".join(f"{name.replace('_', ' ')} {size / 2**20:,.0f} MiB" for name, size in held.items())
        lines.append(f"held by the update: {parts}")
        lines.append(f"optimizer state on storage: {trainer.strategy.state_bytes / 2**20:,.0f} MiB")  # type: ignore[attr-defined]
    if torch.cuda.is_available() and trainer.strategy.root_device.type == "cuda":
        lines.append(f"peak GPU memory: {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB")
    return lines


def peak_rss() -> int:
    """Return the largest resident size of this process so far, in bytes, or 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def printable(text: bytes) -> str:
    """Return the text, indented, and safe for a terminal whatever the model has written."""
    lines = text.decode(errors="replace").split("\n")
    return "\n".join("    " + "".join(c if c.isprintable() else " " for c in line) for line in lines)
