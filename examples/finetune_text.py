"""Trains a byte-level GPT-2-style model on a folder of text, its optimizer state on storage.

    python examples/finetune_text.py
    python examples/finetune_text.py --data my_text --pattern '*.md' --model-size 124m --storage /mnt/nvme0

Without --data it learns the sources of the Python standard library, with --strategy auto it is plain PyTorch for
comparison. It starts from random weights unless --init-from or --resume names a checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from byte_lm import SIZES, ByteLM
from inputs import at_least
from report import Report
from text_folder import TextFolder

from lightning_smartinfinity import StorageTrafficMonitor

NAME = "smart_infinity"


def main(arguments: list[str] | None = None) -> None:
    """Trains, writes a sample and saves a checkpoint."""
    options = parse(arguments)
    quieten()
    L.seed_everything(options.seed, verbose=False)
    try:
        model = ByteLM(options.model_size, block_size=options.block_size, lr=options.lr, init_from=options.init_from)
        data = build_data(options)
        report, trainer = build_trainer(options)
    except ValueError as error:
        sys.exit(f"finetune_text: {error}")
    trainer.fit(model, data, ckpt_path=options.resume)
    if not report.has_trained:
        sys.exit(f"finetune_text: {options.resume} is at step {trainer.global_step} already: raise --max-steps.")
    path = options.checkpoint_dir / f"{options.strategy}-step{trainer.global_step}.ckpt"
    trainer.save_checkpoint(path)
    if trainer.is_global_zero:
        print(f"\ncheckpoint: {path}\ngo on with: --resume {path} --max-steps {2 * trainer.global_step}")


def quieten() -> None:
    """Silences Lightning's messages about hardware and warnings of libraries about each other."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated.*")


def build_data(options: argparse.Namespace) -> TextFolder:
    """Return the text, already read, so that a wrong folder shows at once."""
    data = TextFolder(
        options.data,
        pattern=options.pattern,
        block_size=options.block_size,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    data.setup("fit")
    return data


def build_trainer(options: argparse.Namespace) -> tuple[Report, L.Trainer]:
    """Return the report and a Trainer like any other but for the strategy's name."""
    every_n_steps = max(1, options.max_steps // 10)
    steps_to_validation = options.max_steps // (2 if options.max_steps % 2 == 0 else 1)  # the last step is one of them
    monitor = StorageTrafficMonitor() if options.strategy == NAME else None
    report = Report(
        every_n_steps=every_n_steps,
        monitor=monitor,
        prompt=options.prompt,
        sample_bytes=options.sample_bytes,
        temperature=options.temperature,
    )
    trainer = L.Trainer(
        strategy=choose_strategy(options),
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision or choose_precision(options.accelerator),
        max_steps=options.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip or None,
        log_every_n_steps=every_n_steps,
        val_check_interval=options.accumulate * steps_to_validation,
        num_sanity_val_steps=-1,  # all of the held-out windows, for the loss before training
        callbacks=[callback for callback in (monitor, report) if callback is not None],
        default_root_dir=options.checkpoint_dir,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        logger=False,
    )
    return report, trainer


def choose_strategy(options: argparse.Namespace) -> Any:
    """Return the strategy by name, or an instance if it takes settings."""
    if options.storage is None:
        return options.strategy
    if options.strategy != NAME:
        raise ValueError(f"--storage means nothing to --strategy {options.strategy}.")
    from lightning_smartinfinity import SmartInfinityStrategy

    return SmartInfinityStrategy(storage=options.storage)


def choose_precision(accelerator: str) -> str:
    """Return bfloat16 where it is not emulated, since a CPU that emulates it is ten times slower than in float32."""
    if accelerator != "cpu" and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
    cpu = Path("/proc/cpuinfo")
    instructions = set(cpu.read_text().split()) if cpu.exists() else set()
    return "bf16-mixed" if instructions & {"avx512_bf16", "amx_bf16", "bf16"} else "32-true"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options, checked as far as they can be without loading anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    positive = at_least(1)
    parser.add_argument("--data", help="folder of text (default: the Python standard library's sources)")
    parser.add_argument("--pattern", default="*.py", help="which files (default: %(default)s)")
    parser.add_argument("--model-size", default="tiny", choices=SIZES, help="default: %(default)s")
    parser.add_argument("--strategy", default=NAME, help="Lightning strategy (default: %(default)s)")
    parser.add_argument("--storage", nargs="+", metavar="FOLDER", help="folders for optimizer state")
    parser.add_argument("--precision", help="default: bf16-mixed if the hardware multiplies bfloat16, else 32-true")
    parser.add_argument("--max-steps", type=positive, default=200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=positive, default=16, help="windows per micro-batch and process")
    parser.add_argument("--block-size", type=positive, default=128, help="bytes per window (default: %(default)s)")
    parser.add_argument("--accumulate", type=positive, default=1, help="micro-batches per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0: any (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accelerator", default="auto", help="cpu, cuda, ... (default: %(default)s)")
    parser.add_argument("--devices", type=positive, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("runs/finetune_text"), help="default: %(default)s")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", metavar="CKPT", help="go on with a run, exactly where it was saved")
    start.add_argument("--init-from", metavar="CKPT", help="begin a new run with a checkpoint's weights")
    parser.add_argument("--prompt", default="def ", help="what the sample begins with")
    parser.add_argument("--sample-bytes", type=at_least(0), default=200, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the sample; 0: greedy")
    options = parser.parse_args(arguments)
    for name in ("resume", "init_from"):
        path = getattr(options, name)
        if path is not None and not Path(path).exists():
            parser.error(f"--{name.replace('_', '-')} {path}: no such checkpoint")
    if not options.prompt:
        parser.error("--prompt needs at least one character")
    return options


if __name__ == "__main__":
    main()
