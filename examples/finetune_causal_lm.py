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
from pathlib import Path
from typing import Any

import lightning as L
import torch
from inputs import at_least
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smartinfinity import SmartInfinityError, SmartInfinityStrategy

try:
    from causal_lm import CausalLM
    from chats import Chats
except ModuleNotFoundError as error:
    sys.exit(f"finetune_causal_lm: {error}. In the checkout: pip install '.[huggingface]'")

SAMPLE_TOKENS = 40
IF_POSSIBLE = "storage-or-new"  # resumes from the newest of storage and checkpoints, or begins


def main(arguments: list[str] | None = None) -> None:
    """Train, evaluate, write a sample, and save what ``from_pretrained`` loads."""
    options = parse(arguments)
    quieten()
    L.seed_everything(options.seed, verbose=False)
    try:
        require_own_folder(options.run_dir / "checkpoints", options.resume)
        model, data = build_model(options), build_data(options)
    except ValueError as error:
        sys.exit(f"finetune_causal_lm: {error}")
    finish = Finish(options.out)
    trainer = build_trainer(options, finish)
    try:
        trainer.fit(model, data, ckpt_path=options.resume)
    except SmartInfinityError as error:  # it says what failed and what to do: no traceback
        sys.exit(f"finetune_causal_lm: {error}")
    if not finish.has_run:
        sys.exit(f"finetune_causal_lm: {options.resume} is at its end already: raise --epochs or --max-steps.")


def require_own_folder(folder: Path, resumed: str | None) -> None:
    """Require that a folder holds no checkpoints, or those of the training that is resumed.

    Otherwise ``last.ckpt`` would be of another training than its neighbours, and a later ``--resume`` of the wrong one.

    Raises:
        ValueError: Another training has its checkpoints there.
    """
    if resumed is not None and folder.resolve() == Path(resumed).absolute().parent.resolve():
        return
    if resumed == IF_POSSIBLE:
        return
    if any(folder.glob("*.ckpt")):
        raise ValueError(
            f"{folder} holds the checkpoints of an earlier training. To go on with it: --resume {folder}/last.ckpt."
            f" To train anew: --run-dir ANOTHER_FOLDER, or remove {folder.parent}."
        )


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
        enable_version_counter=False,  # last.ckpt is always the newest, also after resuming an older one
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
    positive = at_least(1)
    parser.add_argument("model", help="local folder or name on the hub")
    parser.add_argument("chats", help="file of JSON lines")
    parser.add_argument("out", type=Path, help="folder for the result")
    parser.add_argument(
        "--lora",
        type=positive,
        nargs="?",
        const=16,
        default=0,
        metavar="RANK",
        help="train adapters only (rank 16)",
    )
    parser.add_argument("--storage", nargs="+", metavar="FOLDER", help="folders for optimizer state")
    parser.add_argument("--run-dir", type=Path, help="for checkpoints and state (default: runs/ and the name of OUT)")
    parser.add_argument(
        "--resume", metavar="CKPT", help=f"go on exactly where a checkpoint was saved; {IF_POSSIBLE}: if there is any"
    )
    parser.add_argument("--save-every", type=positive, metavar="STEPS", help="default: a checkpoint after each epoch")
    parser.add_argument("--keep", type=at_least(-1), default=1, help="newest checkpoints to keep; -1: all (default: 1)")
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--max-steps", type=positive, default=-1, help="end earlier, after so many optimizer steps")
    parser.add_argument("--batch-size", type=positive, default=1, help="chats per micro-batch and process")
    parser.add_argument("--accumulate", type=positive, default=1, help="micro-batches per step")
    parser.add_argument("--max-tokens", type=positive, default=2048, help="longer chats are cut (default: %(default)s)")
    parser.add_argument("--answers", choices=("all", "last"), default="all", help="which answers of a chat are learnt")
    parser.add_argument("--lr", type=float, help="peak learning rate (default: 1e-5, with --lora 2e-4)")
    parser.add_argument("--loss-chunks", type=positive, default=32, help="pieces of the loss (default: %(default)s)")
    parser.add_argument("--precision", default="bf16-mixed", help="32-true is faster on a CPU without bfloat16")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=positive, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.resume not in (None, IF_POSSIBLE) and not Path(options.resume).exists():
        parser.error(f"--resume {options.resume}: no such checkpoint")
    options.run_dir = options.run_dir or Path("runs") / options.out.resolve().name
    return options


if __name__ == "__main__":
    main()
