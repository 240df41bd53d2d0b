"""Text and chats become windows and batches; mistakes in files are answered in a line. The model of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.examples.folders import CHATS, MARKED, UNMARKED, make_tokenizer, write_chats

Example = Callable[[str], ModuleType]


def write(folder: Path, **texts: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)


def test_windows_of_files(example: Example, tmp_path: Path) -> None:
    """Every file is on one side, every byte but the first is predicted once, and reading stops at ``max_bytes``."""
    write(tmp_path / "all", **{f"file{index}": chr(65 + index) * 50 for index in range(26)})
    text_folder = example("text_folder")
    data = text_folder.TextFolder(str(tmp_path / "all"), block_size=8)
    data.setup("fit")
    train, held_out = (set(windows.bytes.tolist()) for windows in (data.train_windows, data.val_windows))
    assert len(held_out) == 2 and not train & held_out
    assert train | held_out == set(range(65, 91))
    write(tmp_path, a="0123456789", b="x" * 600, c="y" * 600, d="ä€")
    windows = text_folder.Windows([tmp_path / "a.py"], 3, 1000)
    assert [bytes(windows[index].tolist()) for index in range(len(windows))] == [b"0123", b"3456", b"6789"]
    read = text_folder.read_bytes([tmp_path / "b.py", tmp_path / "c.py"], 1000)
    assert bytes(read.tolist()) == b"x" * 600 + b"y" * 400
    window = text_folder.Windows([tmp_path / "d.py"], 4, 1000)[0]  # of text in any encoding
    assert window.dtype == torch.uint8 and bytes(window.tolist()) == "ä€".encode()


def test_sampler_goes_on_where_it_stopped(example: Example) -> None:
    """A sampler started later continues the order, also past the end of a round."""
    sampler = example("text_folder").EndlessSampler
    whole = list(islice(sampler(7, seed=3, rank=0, num_ranks=1, start=0), 30))
    for start in (0, 5, 7, 16):
        assert list(islice(sampler(7, seed=3, rank=0, num_ranks=1, start=start), 10)) == whole[start : start + 10]
    assert sorted(whole[:7]) == sorted(whole[7:14]) == list(range(7))
    assert whole[:7] != whole[7:14]
    # Two ranks together see the windows that one rank would see.
    one = list(islice(sampler(8, seed=0, rank=0, num_ranks=1, start=0), 16))
    first, second = (list(islice(sampler(8, seed=0, rank=rank, num_ranks=2, start=0), 8)) for rank in (0, 1))
    assert [window for pair in zip(first, second, strict=True) for window in pair] == one


# It writes <think> only in the last answer, as Qwen3 does.
REWRITING = UNMARKED.replace(
    "{{ message.content }}",
    '{% if message.role == "assistant" and loop.last %}<think></think>{% endif %}{{ message.content }}',
)

MISNAMED = [CHATS[0][1], {"role": "assistant", "text": "Memory."}]


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


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (MARKED, "The ring.<|end|>"),
        (UNMARKED, "The ring.<|end|>"),
        (REWRITING, "<think></think>The ring.<|end|>"),
        (UNMARKED.replace("<|end|>", "."), "The ring..\n"),
    ],
    ids=["marked", "unmarked", "rewriting", "without a token that ends a turn"],
)
def test_last_answer(example: Example, tmp_path: Path, template: str, answer: str) -> None:
    """Only the last answer has labels, from the end of the prompt on; a template that rewrites cannot learn all."""
    tokenizer, tokenize = make_tokenizer(tmp_path, template), example("chats").tokenize
    assert learnt(tokenizer, tokenize(tokenizer, CHATS[0], answers="last")) == answer
    if template == REWRITING:  # the text of a chat is not what the model would have seen
        with pytest.raises(ValueError, match=r"writes message 2 in another way.*--answers last"):
            tokenize(tokenizer, CHATS[0], answers="all")


def test_a_file_of_chats(example: Example, tmp_path: Path) -> None:
    """Every twentieth chat is held out; those that are cut, and those without an answer left, are counted."""
    make_tokenizer(tmp_path / "model", UNMARKED)

    def chats_of(chats: list[list[dict[str, str]]], **options: Any) -> Any:
        path = write_chats(tmp_path / "chats.jsonl", chats)
        made = example("chats").Chats(str(tmp_path / "model"), str(path), **options)
        made.setup("fit")
        return made

    data = chats_of(CHATS * 3)
    assert (len(data.train_chats), len(data.val_chats), data.prompt) == (19, 2, CHATS[0][:2])
    long = [{"role": "user", "content": "xyz " * 100}, CHATS[0][2]]
    with pytest.warns(UserWarning, match=r"1 of 2 chats have more than 200 tokens.*1 of them have no answer"):
        assert len(chats_of([CHATS[0], CHATS[1], long], max_tokens=200).train_chats) == 1
    with pytest.raises(ValueError, match="No answer begins within 4 tokens"), pytest.warns(match="cut there"):
        chats_of(CHATS, max_tokens=4)


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


def numbered(number: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": [index], "labels": [index]} for index in range(1, number + 1)]


def seen(batches: Any) -> list[list[int]]:
    """Return the tokens of the batches of an epoch."""
    return [batch["input_ids"].flatten().tolist() for batch in batches]


@pytest.mark.parametrize("position", [1, 3, 4])
def test_batches_go_on_after_a_resume(example: Example, position: int) -> None:
    """Batches that take over the state of others continue their epoch, and have the same epochs after it."""
    batches, stopped, resumed = (example("chats").Batches(numbered(7), 2, seed=3) for _ in range(3))
    first, second = seen(batches), seen(batches)
    assert second != first and sorted(chain(*first)) == sorted(chain(*second)) == list(range(1, 8))
    assert seen(islice(stopped, position)) == first[:position]
    resumed.load_state_dict(stopped.state_dict())
    assert ([] if position == len(first) else seen(resumed)) == first[position:]
    assert seen(resumed) == second


@pytest.mark.parametrize(("number", "ranks"), [(8, 2), (7, 2), (5, 2), (1, 3)])
def test_ranks_have_as_many_batches(example: Example, number: int, ranks: int) -> None:
    """Every rank has the same number of batches, and together they have every chat."""
    batches = example("chats").Batches
    found = [seen(batches(numbered(number), 2, seed=0, rank=rank, num_ranks=ranks)) for rank in range(ranks)]
    assert len({len(one) for one in found}) == 1
    assert {token for one in found for batch in one for token in batch} == set(range(1, number + 1))


def test_shorter_chats_are_padded(example: Example) -> None:
    """Padding is masked and has no labels."""
    batch = example("chats").collate(
        [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    )
    assert torch.equal(batch["input_ids"], torch.tensor([[5, 6, 7], [8, 0, 0]]))
    assert torch.equal(batch["attention_mask"], torch.tensor([[1, 1, 1], [1, 0, 0]]))
    assert torch.equal(batch["labels"], torch.tensor([[-100, 6, 7], [8, -100, -100]]))


@pytest.mark.parametrize(("size", "expected"), [("124m", 124e6), ("355m", 355e6), ("774m", 774e6), ("1.5b", 1558e6)])
def test_sizes_hold_what_their_names_say(example: Example, size: str, expected: float) -> None:
    """The sizes have GPT-2's parameter counts, within two percent."""
    with torch.device("meta"):
        model = example("byte_lm").ByteLM(size, block_size=1024)
        model.configure_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(expected, rel=0.02)


def test_parts_of_the_model(example: Example) -> None:
    """Only matrices decay, and a prediction does not depend on later bytes."""
    byte_lm = example("byte_lm")
    model = byte_lm.ByteLM("nano")
    model.configure_model()
    for name, parameter in model.named_parameters():
        embedding = name.startswith(("model.bytes", "model.positions"))
        assert byte_lm.is_matrix(name) == (parameter.dim() == 2 and not embedding), name
    decoder, tokens = byte_lm.Decoder(2, 32, 2, block_size=8), torch.randint(0, 256, (1, 8))
    changed = torch.cat([tokens[:, :5], torch.zeros(1, 3, dtype=tokens.dtype)], 1)
    assert torch.equal(decoder(tokens)[0, :5], decoder(changed)[0, :5])
