"""Chats out of a file of JSON lines, tokenized by the model's chat template, as a LightningDataModule.

Only answers of the assistant get labels. A template that marks them by {% generation %} says itself which tokens they
are. For other templates they are found by comparing a chat with the prompts that lead to its answers.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from inputs import lines_of
from jinja2 import TemplateError
from pretrained import load_tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100  # the label of tokens that are not learnt, as everywhere in torch and transformers
HELD_OUT_EVERY = 20
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Chat = dict[str, list[int]]
Messages = list[dict[str, Any]]


class Chats(L.LightningDataModule):
    """Chats from a file of JSON lines.

    Args:
        model: Folder of the model, or its name on the hub, for its tokenizer.
        chats: Path of the file.
        batch_size: Chats per micro-batch and process.
        max_tokens: Longer chats are cut there.
        answers: "all" learns every answer of a chat, "last" only the last one.
        seed: Seed for the order of the chats.
    """

    def __init__(
        self,
        model: str,
        chats: str,
        batch_size: int = 1,
        max_tokens: int = 2048,
        answers: str = "all",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seed = seed
        self.batch_size = batch_size
        self.train_chats: list[Chat] = []
        self.val_chats: list[Chat] = []
        self.prompt: Messages = []

    def setup(self, stage: str) -> None:
        if self.train_chats:
            return
        self.tokenizer = load_tokenizer(self.hparams["model"])
        require_template(self.tokenizer, self.hparams["model"])
        chats = read_chats(Path(self.hparams["chats"]))
        self.val_chats = self.tokenized(chats[::HELD_OUT_EVERY])
        self.train_chats = self.tokenized([chat for index, chat in enumerate(chats) if index % HELD_OUT_EVERY])
        _, messages = chats[0]
        first_answer = [message["role"] for message in messages].index("assistant")
        self.prompt = messages[:first_answer]

    def tokenized(self, chats: list[tuple[str, Messages]]) -> list[Chat]:
        """Return the chats that have an answer within ``max_tokens``; those without are counted, and left out."""
        limit = self.hparams["max_tokens"]
        whole = [self.tokenized_line(where, messages) for where, messages in chats]
        num_cut = sum(len(chat["input_ids"]) > limit for chat in whole)
        cut = [{name: tokens[:limit] for name, tokens in chat.items()} for chat in whole]
        kept = [chat for chat in cut if set(chat["labels"][1:]) - {IGNORED}]
        if num_cut:
            warnings.warn(
                f"{num_cut} of {len(chats)} chats have more than {limit} tokens and are cut there;"
                f" {len(chats) - len(kept)} of them have no answer before, and are left out.",
                stacklevel=2,
            )
        if not kept:
            raise ValueError(f"No answer begins within {limit} tokens: raise max_tokens.")
        return kept

    def tokenized_line(self, where: str, messages: Messages) -> Chat:
        """Return a chat's tokens and labels.

        Raises:
            ValueError: The chat template does not take it.
        """
        try:
            return tokenize(self.tokenizer, messages, answers=self.hparams["answers"])
        except TemplateError as error:
            raise ValueError(f"{where}: the model's chat template does not take this chat: {error}.") from None

    def train_dataloader(self) -> Batches:
        trainer = self.trainer
        assert trainer is not None
        return Batches(
            self.train_chats, self.batch_size, seed=self.seed, rank=trainer.global_rank, num_ranks=trainer.world_size
        )

    def val_dataloader(self) -> Batches:
        trainer = self.trainer
        assert trainer is not None
        return Batches(self.val_chats, self.batch_size, rank=trainer.global_rank, num_ranks=trainer.world_size)


def require_template(tokenizer: Any, model: str) -> None:
    """Require that a tokenizer has a chat template.

    Raises:
        ValueError: It has none.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer of {model} has no chat template. Take the instruct version of the model, or set"
            " tokenizer.chat_template and save the tokenizer beside the model."
        )


def read_chats(path: Path) -> list[tuple[str, Messages]]:
    """Return the chats of a file of JSON lines, each with the file and line where it stands.

    Raises:
        ValueError: The file cannot be read, a line is no chat, or there are fewer than two chats.
    """
    chats = [(where, read_chat(line, where)) for where, line in lines_of(path).items()]
    if len(chats) < 2:
        raise ValueError(f"{path} holds {len(chats)} chats: one to learn from and one to hold out are needed.")
    return chats


def read_chat(line: str, where: str) -> Messages:
    """Return the messages of a line.

    Raises:
        ValueError: The line is no chat, a message says nothing, or nobody answers.
    """
    try:
        messages: Messages = json.loads(line)["messages"]
        roles = [message["role"] for message in messages]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f'{where} is no chat, {{"messages": [{{"role": ..., "content": ...}}, ...]}}.') from None
    for number, message in enumerate(messages):
        # Templates leave out what is missing, or end in an error of Jinja's. A message may be a call of tools instead.
        if message.get("content") is None and not message.get("tool_calls"):
            fields = ", ".join(map(repr, message))
            raise ValueError(f"{where}: message {number} has no 'content' (its fields: {fields}).")
    if "assistant" not in roles[1:] or roles[0] == "assistant":
        raise ValueError(f"{where}: nobody asks, or the assistant does not answer (roles: {', '.join(roles)}).")
    return messages


def tokenize(tokenizer: Any, messages: Messages, *, answers: str) -> Chat:
    """Return a chat's tokens, and the labels, which are ``IGNORED`` outside of answers."""
    if answers == "all" and GENERATION.search(tokenizer.get_chat_template()):
        # The template itself marks what the assistant generates.
        found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        is_answer = [bool(mark) for mark in found["assistant_masks"]]
    else:
        text, spans = find_answers(tokenizer, messages, answers=answers)
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        is_answer = [
            any(first < end and begin < last for begin, end in spans) for first, last in found["offset_mapping"]
        ]
    tokens = list(found["input_ids"])
    labels = [token if learnt else IGNORED for token, learnt in zip(tokens, is_answer, strict=True)]
    return {"input_ids": tokens, "labels": labels}


def find_answers(tokenizer: Any, messages: Messages, *, answers: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as text, and where answers begin and end in it: what the model itself would have to write.

    An answer begins where the prompt ends that ``add_generation_prompt`` makes of the messages before it. It ends with
    the token that ends generation. If the template writes no such token, it ends where the template's turn ends.

    Raises:
        ValueError: The template writes the beginning of a chat in another way when more messages follow.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for number in numbers if answers == "all" else numbers[-1:]:
        prompt = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
        turn = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False)
        if not turn.startswith(prompt) or not text.startswith(turn):
            raise ValueError(
                f"The chat template writes message {number} in another way when more follow, so what the model would "
                "have seen and answered is not in the chat. Learn the last answers only (--answers last), or mark"
                " answers in the template by {% generation %}."
            )
        end_mark = tokenizer.eos_token or ""
        marked = turn.rfind(end_mark, len(prompt)) if end_mark else -1
        spans.append((len(prompt), marked + len(end_mark) if marked >= 0 else len(turn)))
    return text, spans


class Batches:
    """Micro-batches of one process, in a new order in each epoch; after a resume they go on where they were.

    Args:
        chats: What ``tokenize`` returned.
        batch_size: Chats of a micro-batch.
        seed: Seed for the order; None keeps the order, and begins anew each time.
        rank: The number of this process.
        num_ranks: Number of processes. All have the same number of batches, since ZeRO-3 needs all of them in each.
    """

    def __init__(
        self, chats: Sequence[Chat], batch_size: int, *, seed: int | None = None, rank: int = 0, num_ranks: int = 1
    ) -> None:
        self.chats = chats
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.num_ranks = num_ranks
        self.epoch = self.position = 0

    def __len__(self) -> int:
        return -(-len(self.chats) // (self.batch_size * self.num_ranks))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if self.position == len(self) or self.seed is None:
            self.epoch, self.position = self.epoch + 1, 0
        order = self.order()
        while self.position < len(self):
            self.position += 1
            size = self.batch_size * self.num_ranks
            together = order[(self.position - 1) * size : self.position * size]
            yield collate([self.chats[index] for index in together[self.rank :: self.num_ranks] or together[:1]])

    def order(self) -> list[int]:
        """Return the epoch's order of the chats."""
        if self.seed is None:
            return list(range(len(self.chats)))
        order: list[int] = torch.randperm(
            len(self.chats), generator=torch.Generator().manual_seed(self.seed + self.epoch)
        ).tolist()
        return order

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def collate(chats: Sequence[Chat]) -> dict[str, Tensor]:
    """Return int64 ``[batch, time]`` tensors, padded to the longest chat."""
    rows = {name: [torch.tensor(chat[name]) for chat in chats] for name in ("input_ids", "labels")}
    masks = [torch.ones_like(row) for row in rows["input_ids"]]
    return {
        "input_ids": pad_sequence(rows["input_ids"], batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
        "labels": pad_sequence(rows["labels"], batch_first=True, padding_value=IGNORED),
    }
