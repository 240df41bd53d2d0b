"""Memory and rate of exports of a model, beside raw writes to the same disk.

    python benchmarks/export.py --numel 1.1e9 --storage /mnt/nvme0
    python benchmarks/export.py --model path/to/all-MiniLM-L6-v2

The model has Llama's shape and random weights, or is that of a folder of transformers. A process trains one step in
bf16, saves the model by ``save_pretrained``, as trained and as masters, and saves a checkpoint. Further processes
export the checkpoint to every format. Then the weights are compared: every export in bf16 has the bytes of its masters,
rounded, and transformers loads each folder without a missing or unexpected weight. The benchmark measures the resident
set's high-water mark (VmHWM, reset before), as growth over the moment before, and the rate in bytes of the export.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from comparison import measure, report, table
from machine import describe
from peak_memory import resident, restart_peak
from training import BUCKET, SUB_GROUP

BLOCK = 16 << 20
EXPORTS = {
    "export, bf16": ["--to", "safetensors"],
    "export, fp32": ["--to", "safetensors", "--dtype", "fp32"],
    "export, lightning": ["--to", "lightning"],
}


def watched(action: Callable[[], object], nbytes: Callable[[], int]) -> dict[str, float]:
    """Run something that writes, and return memory and rate."""
    before = resident("VmRSS")
    restart_peak()
    begin = time.perf_counter()
    action()
    seconds = time.perf_counter() - begin
    return {
        "grown_mb": (resident("VmHWM") - before) / 1e6,
        "seconds": seconds,
        "gb": nbytes() / 1e9,
        "gb_s": nbytes() / 1e9 / seconds,
    }


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of the files in a folder."""
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


def configuration(numel: float) -> Any:
    """Return a configuration of Llama's shape with about this many parameters."""
    import transformers

    width, vocab = (2048, 32000) if numel > 4e8 else (512, 8000) if numel > 1e7 else (64, 500)
    layers = max(1, round((numel - 2 * vocab * width) / (12 * width * width)))
    return transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=8 * width // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
    )


def class_of(model: Path) -> Any:
    """Return the class of transformers that a folder names."""
    import transformers

    return getattr(transformers, transformers.AutoConfig.from_pretrained(model).architectures[0])


def train(folder: Path, numel: float, model: Path | None) -> dict[str, dict[str, float]]:
    """Train one step, and save."""
    import lightning.pytorch as pl
    import transformers
    from torch.utils.data import DataLoader

    from lightning_smartinfinity import SmartInfinityStrategy
    from lightning_smartinfinity.planning.survey.passes import loss_of

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            self.model = (
                transformers.LlamaForCausalLM(configuration(numel))
                if model is None
                else class_of(model).from_pretrained(model)
            )

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return loss_of(self.model, batch=1, seq=32)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    strategy = SmartInfinityStrategy(
        folder / "storage", zero={"sub_group_size": SUB_GROUP, "reduce_bucket_size": BUCKET}
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, precision="bf16-true", strategy=strategy, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(torch.randint(0, 500, (1, 32)), batch_size=1))  # type: ignore[arg-type]
    figures = {}
    for name, dtype in {"live, bf16": None, "live, fp32": torch.float32}.items():
        path = folder / name
        figures[name] = watched(lambda p=path, d=dtype: strategy.save_pretrained(p, dtype=d), lambda p=path: size_of(p))
    trainer.save_checkpoint(folder / "ckpt")
    strategy.close()
    return figures


def export(folder: Path, name: str) -> dict[str, float]:
    """Export the checkpoint by the command."""
    from lightning_smartinfinity.cli.main import main
    from lightning_smartinfinity.zero3 import prepare_environment

    prepare_environment("cpu", local_world_size=1)
    import lightning_smartinfinity.export.from_checkpoint  # noqa: F401  # imports are not counted

    out = folder / name
    return watched(lambda: main(["export", str(folder / "ckpt"), str(out), *EXPORTS[name]]), lambda: size_of(out))


def raw_write(folder: Path, nbytes: int) -> dict[str, float]:
    """Write a file of this size by blocks, and flush it."""
    block, file = memoryview(os.urandom(BLOCK)), folder / "raw"

    def write() -> None:
        with file.open("wb", buffering=0) as opened:
            for _ in range(0, nbytes, BLOCK):
                opened.write(block)
            os.fdatasync(opened.fileno())

    return watched(write, lambda: size_of(file))


def misfits(folder: Path) -> int:
    """Count the weights that transformers misses or does not expect in the folders."""
    count = 0
    for name in ("live, bf16", "live, fp32", "export, bf16", "export, fp32"):
        _, found = class_of(folder / name).from_pretrained(folder / name, output_loading_info=True)
        count += sum(len(found[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return count


def differences(folder: Path) -> int:
    """Count the tensors that differ between exports, tensor by tensor."""
    from safetensors import safe_open

    def opened(name: str) -> Any:
        return safe_open(folder / name / "model.safetensors", framework="pt")

    with (
        opened("live, bf16") as live,
        opened("live, fp32") as masters,
        opened("export, bf16") as bf16,
        opened("export, fp32") as fp32,
    ):
        names = list(live.keys())
        assert names == list(bf16.keys()) == list(masters.keys()) == list(fp32.keys())
        return sum(
            not torch.equal(live.get_tensor(name), bf16.get_tensor(name))
            or not torch.equal(masters.get_tensor(name), fp32.get_tensor(name))
            or not torch.equal(masters.get_tensor(name).bfloat16(), live.get_tensor(name))
            for name in names
        )


COLUMNS = {  # key of the figures and number of digits
    "GB": ("gb", 2),
    "seconds": ("seconds", 1),
    "GB/s": ("gb_s", 2),
    "memory added, MB": ("grown_mb", 0),
}


def main() -> int:
    """Measure, compare and print a table below the machine.

    Returns:
        Exit status: 1 if a process failed or weights differ.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, default=1e8, help="parameters (default: %(default).0e)")
    parser.add_argument("--model", type=Path, help="folder of a model to train instead")
    parser.add_argument("--storage", help="folder on the disk to measure; default: a temporary one here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder = Path(options.storage)
        report(
            train(folder, options.numel, options.model) if options.child == "train" else export(folder, options.child)
        )
        return 0
    with tempfile.TemporaryDirectory(dir=options.storage or ".") as name:
        folder = Path(name)
        further = ["--numel", str(options.numel), "--storage", name]
        further += ["--model", str(options.model)] if options.model else []
        trained: Any = measure("train", __file__, "--child", "train", *further)
        rows: dict[str, Any] = dict(trained or {"train": None})
        for each in EXPORTS:
            rows[each] = measure(each, __file__, "--child", each, *further)
        rows["raw write"] = raw_write(folder, size_of(folder / "export, fp32"))
        differing, misfitting = differences(folder), misfits(folder)
    print(describe("torch", "deepspeed", "lightning", "transformers"))
    print(table({name: row for name, row in rows.items() if row is not None}, COLUMNS, head=""))
    print(f"\nTensors that differ between exports in bits: {differing}")
    print(f"Weights that transformers misses or does not expect: {misfitting}")
    return int(None in rows.values() or differing > 0 or misfitting > 0)


if __name__ == "__main__":
    sys.exit(main())
