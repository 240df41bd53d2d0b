"""A causal language model of transformers as a LightningModule, and its loss, for which logits never fill memory."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from chats import IGNORED
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup


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
        self, model: str, lr: float = 1e-5, warmup_share: float = 0.05, lora_rank: int = 0, loss_chunks: int = 32
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
        num_steps = int(self.trainer.estimated_stepping_batches)
        num_warmup = round(self.hparams["warmup_share"] * num_steps)
        schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup, num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


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
