"""Makes what the recipes take: folders of models with tokenizers, and files of chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tests.helpers.model_folder import TEXT, make_model_folder

UNMARKED = """\
{%- for message in messages -%}
<|start|>{{ message.role }}
{{ message.content }}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{% endif -%}
"""
"""A chat template as ChatML, without marks around answers."""

MARKED = """\
{%- for message in messages -%}
<|start|>{{ message.role }}
{% if message.role == "assistant" -%}
{% generation %}{{ message.content }}<|end|>{% endgeneration %}
{%- else -%}
{{ message.content }}<|end|>
{%- endif %}{{ "\\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{% endif -%}
"""
"""The same, which marks what the assistant generates."""

CHATS = [
    [
        {"role": "system", "content": "Answer in a word."},
        {"role": "user", "content": f"What does drive {number} hold?"},
        {"role": "assistant", "content": f"Memory {number}!"},
        {"role": "user", "content": "And in time?"},
        {"role": "assistant", "content": "The ring."},
    ]
    for number in range(7)
]


def make_tokenizer(folder: Path, template: str | None = None) -> Any:
    """Save a tokenizer of bytes and a few words, with special tokens, and return it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|end|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def make_chat_model(folder: Path, template: str = UNMARKED) -> Path:
    """Save a small Llama-shaped model, and a tokenizer with a chat template."""
    make_model_folder(folder)
    make_tokenizer(folder, template)
    return folder


def make_encoder(folder: Path) -> Path:
    """Save a small BERT and its tokenizer."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def write_chats(path: Path, chats: list[list[dict[str, str]]]) -> Path:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path
