"""Fine-tunes a causal language model of transformers on chats, its optimizer state on storage.

    python examples/finetune_causal_lm.py my-model chats.jsonl my-model-tuned
    python examples/finetune_causal_lm.py my-model chats.jsonl my-adapters --lora

my-model is a local folder or a name on the hub; its tokenizer needs a chat template. Each line of chats.jsonl is a
chat, {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}; the first of every
twenty is held out. Only the answers of the assistant are learnt.
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from chats import IGNORED, Chats
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from lightning_smartinfinity import SmartInfinityStrategy

SAMPLE_TOKENS = 40


def main(arguments: list[str] | None = None) -> None:
    """Train, evaluate, write a sample, and save what ``from_pretrained`` loads."""
    options = parse(arguments)
    quieten()
    L.seed_everything(options.seed, verbose=False)
    try:
        model, data = build_model(options), build_data(options)
    except ValueError as error:
        sys.exit(f"finetune_causal_lm: {error}")
    finish = Finish(options.out)
    trainer = build_trainer(options, finish)
    trainer.fit(model, data, ckpt_path=options.resume)
    if not finish.has_run:
        sys.exit(f"finetune_causal_lm: {options.resume} is at its end already: raise --epochs or --max-steps.")


def build_model(options: argparse.Namespace) -> CausalLM:
    """Return the module, which loads the model when the training begins."""
    lr = options.lr or (2e-4 if options.lora else 1e-5)
    return CausalLM(options.model, lr=lr, lora_rank=options.lora, loss_chunks=options.loss_chunks)


def build_data(options: argparse.Namespace) -> Chats:
    """Return the chats, already tokenized, so that mistakes in them show at once."""
    data = Chats(
        options.model,
        options.chats,
        batch_size=options.batch_size,
        max_tokens=options.max_tokens,
        answers=options.answers,
        seed=options.seed,
    )
    data.setup("fit")
    return data


def build_trainer(options: argparse.Namespace, finish: Finish) -> L.Trainer:
    """Return a Trainer like any other but for its strategy."""
    # Frozen weights are in the model's folder: checkpoints of adapters leave them out.
    strategy = SmartInfinityStrategy(options.storage, exclude_frozen_parameters=options.lora > 0)
    saving = ModelCheckpoint(
        options.run_dir / "checkpoints",
        "{step}",
        every_n_train_steps=options.save_every,
        save_top_k=options.keep,
        save_last="link",
    )
    return L.Trainer(
        strategy=strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        max_epochs=options.epochs,
        max_steps=options.max_steps,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        num_sanity_val_steps=-1,  # all held-out chats, for the loss before training
        callbacks=[saving, Report(), finish],
        default_root_dir=options.run_dir,
        logger=False,
    )


def quieten() -> None:
    """Silence messages of libraries about each other."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    warnings.filterwarnings("ignore", message=r".*gradient_checkpointing.* is deprecated.*")


class CausalLM(L.LightningModule):
    """A causal language model of transformers that learns the answers in chats.

    Args:
        model: Folder of the model, or its name on the hub.
        lr: Peak learning rate of AdamW, after a warm-up; it falls along a cosine.
        warmup_share: Share of the steps that the learning rate rises for.
        lora_rank: Rank of LoRA adapters on all linear layers; 0 trains all weights.
        loss_chunks: Pieces in which the loss is computed: the logits of one piece are in memory at a time.
    """

    def __init__(
        self, model: str, lr: float = 1e-5, warmup_share: float = 0.05, lora_rank: int = 0, loss_chunks: int = 8
    ) -> None:
        super().__init__()
        if lora_rank > 0 and find_spec("peft") is None:
            raise ValueError("Adapters need PEFT: pip install peft")
        self.save_hyperparameters()
        self.model: Any = None
        self.strict_loading = lora_rank == 0  # the checkpoints of adapters hold the adapters only

    def configure_model(self) -> None:
        # Here and not in __init__, so that ZeRO-3 divides each layer as soon as it is loaded.
        if self.model is not None:
            return
        self.model = AutoModelForCausalLM.from_pretrained(self.hparams["model"])
        self.model.gradient_checkpointing_enable()
        if self.hparams["lora_rank"] > 0:
            self.model = with_adapters(self.model, self.hparams["lora_rank"])
        self.model.train()  # from_pretrained leaves it in eval mode: no dropout, no checkpointing

    @property
    def language_model(self) -> Any:
        """The model of transformers, without PEFT around it."""
        return self.model.get_base_model() if self.hparams["lora_rank"] > 0 else self.model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the model's own logits ``[batch, time, vocabulary]`` for int64 tokens ``[batch, time]``."""
        logits: Tensor = self.model(input_ids=input_ids).logits
        return logits

    def hidden(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return what the output layer turns into logits, ``[batch, time, width]``."""
        decoder = self.language_model.get_decoder()
        found = decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        hidden: Tensor = found.last_hidden_state
        return hidden

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean cross entropy of the answers' tokens, in nats per token."""
        hidden = self.hidden(batch["input_ids"], batch["attention_mask"])
        head = self.language_model.get_output_embeddings()
        num_chunks = self.hparams["loss_chunks"]
        return chunked_cross_entropy(hidden[:, :-1], batch["labels"][:, 1:], head, num_chunks=num_chunks)

    def on_fit_start(self) -> None:
        require_plain_head(self)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        num_answer_tokens = int((batch["labels"][:, 1:] != IGNORED).sum())
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True, batch_size=num_answer_tokens)

    def configure_optimizers(self) -> dict[str, Any]:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.hparams["lr"], weight_decay=0.0)
        num_steps = count_steps(self.trainer)
        num_warmup = round(self.hparams["warmup_share"] * num_steps)
        schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup, num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def count_steps(trainer: L.Trainer) -> int:
    """Return how many optimizer steps the training has.

    Lightning's ``trainer.estimated_stepping_batches`` sets the batches up before a resumed training knows where they go
    on: then they would begin anew.
    """
    loader = trainer.datamodule.train_dataloader()  # type: ignore[attr-defined]
    in_epochs = -(-len(loader) // trainer.accumulate_grad_batches) * (trainer.max_epochs or 1)
    limits = [number for number in (trainer.max_steps, in_epochs) if number > 0]
    return min(limits)


def with_adapters(model: Any, rank: int) -> Any:
    """Return the model with LoRA adapters on its linear layers, and all else frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    # ZeRO-3 trains all parameters in one dtype. The fp32 masters of the adapters are in the optimizer state.
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def chunked_cross_entropy(hidden: Tensor, labels: Tensor, head: nn.Module, *, num_chunks: int) -> Tensor:
    """Return the mean cross entropy of all positions that have a label, with the logits of one chunk at a time.

    Forward and backward compute the logits of a chunk when they need them. The number of chunks does not depend on the
    data: with ZeRO-3 all processes have to call the head equally often.

    Args:
        hidden: What the head turns into logits, ``[batch, time, width]``.
        labels: int64 ``[batch, time]``, ``IGNORED`` where nothing is learnt.
        head: The output layer.
        num_chunks: Number of pieces, of nearly equal size.
    """
    is_learnt = labels != IGNORED
    hidden, labels = hidden[is_learnt], labels[is_learnt]
    chunks = zip(hidden.tensor_split(num_chunks), labels.tensor_split(num_chunks), strict=True)
    losses = [checkpoint(summed_cross_entropy, head, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(losses).sum() / labels.numel()


def summed_cross_entropy(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross entropies, float32 as in transformers, of ``[n, width]`` and int64 ``[n]``."""
    return F.cross_entropy(head(hidden).float(), labels, reduction="sum")


@torch.no_grad()
def require_plain_head(module: CausalLM) -> None:
    """Check that the model's logits are those of its head: some models scale or cap them afterwards.

    Raises:
        ValueError: They are not.
    """
    tokens = torch.arange(4, device=module.device).unsqueeze(0)
    module.eval()
    head = module.language_model.get_output_embeddings()
    plain, own = head(module.hidden(tokens)).float(), module(tokens).float()
    module.train()
    if not torch.allclose(plain, own, rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{type(module.language_model).__name__} changes what its output layer returns; a loss in chunks would"
            " leave that out. Let CausalLM.loss return self.model(**batch).loss, which takes memory for all logits."
        )


class Report(L.Callback):
    """Prints the loss on held-out chats, before training and at each evaluation."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        say(trainer, f"step {trainer.global_step}: held-out loss {float(trainer.callback_metrics['val_loss']):.5f}")


class Finish(L.Callback):
    """Answers a held-out question when the training ends, and saves the model, or its adapters, for transformers.

    Args:
        out: Folder to save to.
    """

    def __init__(self, out: Path) -> None:
        self.out = Path(out)
        self.has_run = False

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, CausalLM)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        # Every process takes part in both: ZeRO-3 gathers weights from all of them.
        say(trainer, f"\n{data.prompt[-1]['content']}\n> {answer(pl_module, data)}\n")
        save(trainer, pl_module, self.out)
        if trainer.is_global_zero:
            data.tokenizer.save_pretrained(self.out)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.has_run = True
        say(trainer, f"saved {self.out}; peak memory of the process: {peak / 1e9:.2f} GB")


@torch.no_grad()
def answer(module: CausalLM, data: Chats) -> str:
    """Return the likeliest answer to the held-out question."""
    tokenizer, model = data.tokenizer, module.language_model
    asked = tokenizer.apply_chat_template(
        data.prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(module.device)
    model.eval()
    found = model.generate(
        **asked,
        max_new_tokens=SAMPLE_TOKENS,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        synced_gpus=module.trainer.world_size > 1,
    )
    model.train()
    text: str = tokenizer.decode(found[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def save(trainer: L.Trainer, module: CausalLM, out: Path) -> None:
    """Save the model for ``from_pretrained``, or its adapters for PEFT."""
    if module.hparams["lora_rank"] == 0:
        trainer.strategy.save_pretrained(out)  # type: ignore[attr-defined]
        return
    import deepspeed

    adapters = {name: param for name, param in module.model.named_parameters() if param.requires_grad}
    with deepspeed.zero.GatheredParameters(list(adapters.values())):
        whole = {name: param.detach().cpu().clone() for name, param in adapters.items()}
    if trainer.is_global_zero:
        module.model.save_pretrained(out, state_dict=whole)


def say(trainer: L.Trainer, text: str) -> None:
    """Print on the first process."""
    if trainer.is_global_zero:
        print(text, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="local folder or name on the hub")
    parser.add_argument("chats", help="file of JSON lines")
    parser.add_argument("out", type=Path, help="folder for the result")
    parser.add_argument(
        "--lora", type=int, nargs="?", const=16, default=0, metavar="RANK", help="train adapters of this rank only (16)"
    )
    parser.add_argument("--storage", nargs="+", metavar="FOLDER", help="where the optimizer state lies")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/finetune_causal_lm"), help="default: %(default)s")
    parser.add_argument("--resume", metavar="CKPT", help="go on exactly where a checkpoint was saved")
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="default: a checkpoint after each epoch")
    parser.add_argument("--keep", type=int, default=1, help="newest checkpoints that are kept; -1: all (default: 1)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=-1, help="end earlier, after so many optimizer steps")
    parser.add_argument("--batch-size", type=int, default=1, help="chats per micro-batch and process")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--max-tokens", type=int, default=2048, help="longer chats are cut (default: %(default)s)")
    parser.add_argument("--answers", choices=("all", "last"), default="all", help="which answers of a chat are learnt")
    parser.add_argument("--lr", type=float, help="peak learning rate (default: 1e-5, with --lora 2e-4)")
    parser.add_argument("--loss-chunks", type=int, default=8, help="pieces of the loss (default: %(default)s)")
    parser.add_argument("--precision", default="bf16-mixed", help="32-true is faster on a CPU without bfloat16")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
