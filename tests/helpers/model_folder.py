"""Makes small Llama-shaped models, and a folder with one and its tokenizer, as people download them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "A drive holds what memory cannot, and a ring of buffers brings it back in time. " * 80


def llama_config(**changes: Any) -> LlamaConfig:
    """Return the configuration of a small Llama-shaped model.

    Args:
        changes: Arguments of ``LlamaConfig`` that replace those of the small model.
    """
    small = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "architectures": ["LlamaForCausalLM"],
    }
    return LlamaConfig(**{**small, **changes})


def make_model_folder(folder: Path) -> Path:
    """Save a model with random weights in bf16, and a tokenizer that was trained on :data:`TEXT`.

    Args:
        folder: Path of the folder, which need not exist.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    config = llama_config(
        intermediate_size=128,
        num_hidden_layers=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
