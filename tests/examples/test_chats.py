"""Chats become tokens, and answers labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.examples.folders import CHATS, MARKED, UNMARKED, make_tokenizer, write_chats

Example = Callable[[str], ModuleType]
# It writes <think> only in the last answer, as Qwen3 does.
REWRITING = UNMARKED.replace(
    "{{ message.content }}",
    '{% if message.role == "assistant" and loop.last %}<think></think>{% endif %}{{ message.content }}',
)

MISNAMED = [CHATS[0][1], {"role": "assistant", "text": "Memory."}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "read", "arguments": {}}}]}


def learnt(tokenizer: Any, chat: dict[str, list[int]]) -> str:
    """Return the text of the tokens that have labels."""
    return str(tokenizer.decode([label for label in chat["labels"] if label >= 0]))


def test_answers_are_those_that_a_template_would_mark(example: Example, tmp_path: Path) -> None:
    """A template without marks gets the tokens and labels of transformers for the same template with marks."""
    tokenize = example("chats").tokenize
    marked, unmarked = (make_tokenizer(tmp_path / name, text) for name, text in (("a", MARKED), ("b", UNMARKED)))
    for chat in CHATS:
        expected = marked.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        pairs = zip(expected["input_ids"], expected["assistant_masks"], strict=True)
        labels = [token if mark else -100 for token, mark in pairs]
        assert tokenize(unmarked, chat, answers="all") == {"input_ids": expected["input_ids"], "labels": labels}
        assert tokenize(marked, chat, answers="all")["labels"] == labels
    assert learnt(unmarked, tokenize(unmarked, CHATS[3], answers="all")) == "Memory 3!<|end|>The ring.<|end|>"


@pytest.mark.parametrize("template", [MARKED, UNMARKED, REWRITING], ids=["marked", "unmarked", "rewriting"])
def test_last_answer(example: Example, tmp_path: Path, template: str) -> None:
    """Only the last answer has labels, from the end of the prompt on."""
    tokenizer = make_tokenizer(tmp_path, template)
    thought = "<think></think>" if template == REWRITING else ""
    found = example("chats").tokenize(tokenizer, CHATS[0], answers="last")
    assert learnt(tokenizer, found) == f"{thought}The ring.<|end|>"


def test_template_that_rewrites_what_was_said(example: Example, tmp_path: Path) -> None:
    """Learning every answer is refused, since the text of a chat is not what the model would have seen."""
    with pytest.raises(ValueError, match=r"writes message 2 in another way.*--answers last"):
        example("chats").tokenize(make_tokenizer(tmp_path, REWRITING), CHATS[0], answers="all")


def test_turn_without_a_token_that_ends_it(example: Example, tmp_path: Path) -> None:
    """The whole turn is learnt."""
    tokenizer = make_tokenizer(tmp_path, UNMARKED.replace("<|end|>", "."))
    assert learnt(tokenizer, example("chats").tokenize(tokenizer, CHATS[0], answers="last")) == "The ring..\n"


@pytest.fixture
def data(example: Example, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes the datamodule of a file of chats."""
    make_tokenizer(tmp_path / "model", UNMARKED)

    def make(chats: list[list[dict[str, str]]], **options: Any) -> Any:
        path = write_chats(tmp_path / "chats.jsonl", chats)
        return example("chats").Chats(str(tmp_path / "model"), str(path), **options)

    return make


def test_every_twentieth_chat_is_held_out(data: Callable[..., Any]) -> None:
    """Each chat is on one side."""
    chats = data(CHATS * 3)
    chats.setup("fit")
    assert (len(chats.train_chats), len(chats.val_chats)) == (19, 2)
    assert chats.prompt == CHATS[0][:2]


def test_long_chats_are_cut(data: Callable[..., Any]) -> None:
    """A warning counts the chats that are cut, and those that have no answer left."""
    long = [{"role": "user", "content": "xyz " * 100}, CHATS[0][2]]
    chats = data([CHATS[0], CHATS[1], long], max_tokens=200)
    with pytest.warns(UserWarning, match=r"1 of 2 chats have more than 200 tokens.*1 of them have no answer"):
        chats.setup("fit")
    assert len(chats.train_chats) == 1
    with pytest.raises(ValueError, match="No answer begins within 4 tokens"), pytest.warns(match="cut there"):
        data(CHATS, max_tokens=4).setup("fit")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no JSON", r"chats\.jsonl:2 is no chat"),
        ('{"text": "hello"}', r"chats\.jsonl:2 is no chat"),
        ('["messages"]', r"chats\.jsonl:2 is no chat"),
        (json.dumps({"messages": CHATS[0][:2]}), r"chats\.jsonl:2: nobody asks, or .* \(roles: system, user\)"),
        (json.dumps({"messages": CHATS[0][2:]}), r"chats\.jsonl:2: nobody asks"),
        (
            json.dumps({"messages": MISNAMED}),
            r"chats\.jsonl:2: message 1 has no 'content' \(its fields: .*'text'\)",
        ),
        ("", r"holds 1 chats"),
    ],
)
def test_line_that_is_no_chat(example: Example, tmp_path: Path, line: str, message: str) -> None:
    """The error names the file and the line."""
    path = write_chats(tmp_path / "chats.jsonl", CHATS[:1])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=message):
        example("chats").read_chats(path)


def test_message_that_calls_a_tool(example: Example, tmp_path: Path) -> None:
    """It needs no content."""
    chat = [CHATS[0][1], CALL, {"role": "tool", "content": "8"}, CHATS[0][2]]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n" + json.dumps({"messages": chat}) + "\n" + json.dumps({"messages": CHATS[0]}))
    assert example("chats").read_chats(path) == [(f"{path}:2", chat), (f"{path}:3", CHATS[0])]


def test_chat_that_the_template_refuses(example: Example, tmp_path: Path) -> None:
    """The error has the template's reason, and names the file and the line."""
    refusing = "{% if messages | length > 3 %}{{ raise_exception('Too long a chat') }}{% endif %}" + UNMARKED
    make_tokenizer(tmp_path / "model", refusing)
    path = write_chats(tmp_path / "chats.jsonl", [CHATS[0][:3], CHATS[1]])
    with pytest.raises(ValueError, match=r"chats\.jsonl:2: the model's chat template does not take.*Too long a chat"):
        example("chats").Chats(str(tmp_path / "model"), str(path)).setup("fit")


def test_model_without_a_chat_template(example: Example, tmp_path: Path) -> None:
    """The error names the model, and says where to get a template."""
    make_tokenizer(tmp_path / "model")
    with pytest.raises(ValueError, match=r"/model has no chat template\. Take the instruct version"):
        example("chats").Chats(str(tmp_path / "model"), "chats.jsonl").setup("fit")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", r"^There is no folder \./nowhere\.$"),
        (
            "nowhere",
            r"^There is no folder nowhere, and the hub gives no .*: We couldn't connect\. Retry\.$",
        ),
        ("empty", r"^The folder empty has no tokenizer that transformers can load: We couldn't connect\. Retry\.$"),
    ],
)
def test_model_that_is_not_there(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    """The error is one line and names what was asked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    pretrained = example("pretrained")

    def fail(model: str) -> None:
        raise OSError("We couldn't connect.\nRetry.")

    monkeypatch.setattr(pretrained.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(ValueError, match=message):
        pretrained.load_tokenizer(name)


def numbered(number: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": [index], "labels": [index]} for index in range(1, number + 1)]


def seen(batches: Any) -> list[list[int]]:
    """Return the tokens of the batches of an epoch."""
    return [batch["input_ids"].flatten().tolist() for batch in batches]


def tokens_of(batches: list[list[int]]) -> list[int]:
    """Return the tokens in order."""
    return sorted(token for batch in batches for token in batch)


@pytest.mark.parametrize("position", [1, 3, 4])
def test_batches_go_on_after_a_resume(example: Example, position: int) -> None:
    """Batches that take over the state of others continue their epoch, and have the same epochs after it."""
    batches, resumed = (example("chats").Batches(numbered(7), 2, seed=3) for _ in range(2))
    first = seen(batches)
    assert tokens_of(first) == list(range(1, 8))
    second = seen(batches)
    assert second != first and tokens_of(second) == list(range(1, 8))
    stopped = example("chats").Batches(numbered(7), 2, seed=3)
    assert seen(islice(stopped, position)) == first[:position]
    resumed.load_state_dict(stopped.state_dict())
    rest = [] if position == len(first) else seen(resumed)
    assert rest == first[position:]
    assert seen(resumed) == second


@pytest.mark.parametrize(("number", "ranks"), [(8, 2), (7, 2), (5, 2), (1, 3)])
def test_ranks_have_as_many_batches(example: Example, number: int, ranks: int) -> None:
    """Every rank has the same number of batches, and together they have every chat."""
    batches = example("chats").Batches
    found = [seen(batches(numbered(number), 2, seed=0, rank=rank, num_ranks=ranks)) for rank in range(ranks)]
    assert len({len(one) for one in found}) == 1
    assert {token for one in found for token in tokens_of(one)} == set(range(1, number + 1))


def test_shorter_chats_are_padded(example: Example) -> None:
    """Padding is masked and has no labels."""
    batch = example("chats").collate(
        [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    )
    assert torch.equal(batch["input_ids"], torch.tensor([[5, 6, 7], [8, 0, 0]]))
    assert torch.equal(batch["attention_mask"], torch.tensor([[1, 1, 1], [1, 0, 0]]))
    assert torch.equal(batch["labels"], torch.tensor([[-100, 6, 7], [8, -100, -100]]))
