"""The recipes as a user starts them, at their smallest size, bad command lines, and the data that they read."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.examples.conftest import EXAMPLES
from tests.examples.folders import CHATS, MARKED, UNMARKED, make_chat_model, make_encoder, make_tokenizer, write_chats
from tests.helpers.assertions import assert_equal
from tests.huggingface.trained import weights_in

Run = Callable[..., str]
Example = Callable[[str], ModuleType]
SMALL = (
    "--model-size",
    "nano",
    "--block-size",
    "32",
    "--batch-size",
    "4",
    "--sample-bytes",
    "8",
    "--accelerator",
    "cpu",
)


def test_trains_saves_and_goes_on(run_example: Run, tmp_path: Path) -> None:
    """The output has all reports, and the checkpoint resumes and starts new runs."""
    # The default depends on the CPU, and with it the bytes of a step.
    options = (*SMALL, "--precision", "bf16-mixed")
    output = run_example("finetune_text.py", *options, "--max-steps", "4", "--storage", "disk0", "disk1")
    assert [int(step) for step in re.findall(r"^ +(\d+) +\d\.\d{3} {6,}", output, re.MULTILINE)] == [1, 2, 3, 4]
    losses = [float(loss) for loss in re.findall(r"(\d\.\d{3}) at step", output)]
    assert losses[1] < losses[0] < 5.7
    for part in (r"24\.\d\d bytes per parameter", r"peak memory of the process: \d+ MiB", r"ring \d+ MiB", r"sample\n"):
        assert re.search(part, output), part
    checkpoint = "runs/finetune_text/smart_infinity-step4.ckpt"
    assert checkpoint in output and (tmp_path / "disk1").is_dir()
    assert "2 steps in" in run_example("finetune_text.py", *options, "--max-steps", "6", "--resume", checkpoint)
    weights = run_example("finetune_text.py", *options, "--max-steps", "1", "--init-from", checkpoint)
    assert losses[1] == pytest.approx(float(re.findall(r"(\d\.\d{3}) at step 0", weights)[0]), abs=0.02)
    over = run_example("finetune_text.py", *options, "--max-steps", "4", "--resume", checkpoint, status=1)
    assert "is at step 4 already: raise --max-steps" in over


def test_lightning_cli(run_example: Run, tmp_path: Path) -> None:
    """The configuration file trains, finds the strategy by name, and logs the traffic."""
    options = {
        "trainer.max_steps": "4",
        "trainer.val_check_interval": "2",
        "trainer.log_every_n_steps": "2",
        "trainer.accelerator": "cpu",
        # A row has all bytes of its steps.
        "trainer.strategy": "lightning_smartinfinity.SmartInfinityStrategy",
        "trainer.strategy.overlap": "none",
        "model.model_size": "nano",
        "model.block_size": "32",
        "data.block_size": "32",
        "data.batch_size": "4",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    run_example("cli.py", "fit", "--config", str(EXAMPLES / "finetune_text.yaml"), *arguments)
    (metrics,) = tmp_path.rglob("metrics.csv")
    with metrics.open() as file:
        rows = [row for row in csv.DictReader(file) if row["io/bytes_per_parameter"]]
    assert [int(row["step"]) for row in rows] == [1, 3]
    assert all(24 <= float(row["io/bytes_per_parameter"]) < 25 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-size", "huge"], "invalid choice: 'huge'"),
        (["--max-steps", "0"], "0 is below 1"),
        (["--resume", "nowhere.ckpt"], "--resume nowhere.ckpt: no such checkpoint"),
        (["--resume", ".", "--init-from", "."], "not allowed with argument"),
        (["--prompt", ""], "--prompt needs at least one character"),
        (["--data", "nowhere"], "nowhere is not a folder"),
        (["--data", "empty"], "0 files like"),
        (["--strategy", "auto", "--storage", "disk"], "--storage means nothing to --strategy auto"),
        (["--strategy", "fast"], "fast"),
        (["--precision", "bf8"], "bf8"),
    ],
)
def test_bad_arguments(
    example: Example,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The program ends with a message before it trains or writes anything."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        example("finetune_text").main([*SMALL, *arguments])
    assert (
        ended.value.code not in (0, None)
        and message in f"{ended.value.code}{capsys.readouterr().err}"
        and [path.name for path in tmp_path.iterdir()] == ["empty"]
    )


ACCURACY = re.compile(r"^accuracy .*: +(\d+\.\d\d) %$", re.MULTILINE)
TEXTS = [
    (f"{'memory' if index % 3 else 'a ring'} of drive {index}", "one" if index % 3 else "two") for index in range(48)
]


def write_labelled(path: Path) -> None:
    path.write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in TEXTS))


def test_trains_compares_and_saves(run_example: Run, tmp_path: Path) -> None:
    """Both accuracies are printed, and transformers loads a classifier with the second one and the names of labels."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    make_encoder(tmp_path / "encoder")
    write_labelled(tmp_path / "labelled.jsonl")
    options = (
        "--labelled",
        "labelled.jsonl",
        "--out",
        "classifier",
        "--epochs",
        "4",
        "--batch-size",
        "8",
        "--lr",
        "1e-3",
    )
    output = run_example("finetune_encoder.py", "encoder", *options, "--accelerator", "cpu")
    frozen, tuned = (float(number) for number in ACCURACY.findall(output))
    assert "36 passages learnt, 12 held out, of 2 labels: one, two" in output and 0 < frozen <= 100
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "classifier")
    held_out = TEXTS[::4]
    found = [int(model(**tokenizer(text, return_tensors="pt")).logits.argmax()) for text, _ in held_out]
    right = [model.config.id2label[number] == label for number, (_, label) in zip(found, held_out, strict=True)]
    assert 100 * sum(right) / len(right) == pytest.approx(tuned, abs=0.01)


WIDTH, VOCABULARY, TIME = 8, 1000, 64
HELD_OUT_LOSS = re.compile(r"step (\d+): held-out loss (\d+\.\d+)")


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(one.numel() for one in tree_leaves(returned) if isinstance(one, torch.Tensor))])
        return returned


@pytest.mark.parametrize("num_labels", [TIME, 40, 3])
@pytest.mark.parametrize("num_chunks", [1, 8])
def test_loss_in_chunks_is_that_of_torch(example: Example, num_labels: int, num_chunks: int) -> None:
    """Loss and gradients equal torch's over all logits, of which no tensor ever holds more than a chunk's."""
    labels = torch.full((TIME,), -100)
    labels[torch.randperm(TIME)[:num_labels]] = torch.randint(0, VOCABULARY, (num_labels,))
    chunked, found, largest = example("causal_lm").chunked_cross_entropy, [], []
    for ours in (True, False):
        torch.manual_seed(0)
        hidden, head = torch.randn(2, TIME // 2, WIDTH, requires_grad=True), nn.Linear(WIDTH, VOCABULARY)
        with LargestTensor() as mode:
            if ours:
                value = chunked(hidden, labels.view(2, -1), head, num_chunks=num_chunks)
            else:
                value = nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels)
            value.backward()
        found.append([value.detach(), hidden.grad, head.weight.grad, head.bias.grad])
        largest.append(mode.numel)
    torch.testing.assert_close(*found)
    assert largest[0] <= max(TIME * VOCABULARY // num_chunks, WIDTH * VOCABULARY) and largest[1] == TIME * VOCABULARY


def test_model_that_caps_its_logits(example: Example) -> None:
    """A model whose logits are not those of its output layer is refused by name."""
    recipe, head, hidden = example("causal_lm"), nn.Linear(WIDTH, VOCABULARY), torch.randn(1, 4, WIDTH)
    module = mock.Mock(device="cpu", return_value=head(hidden))
    module.hidden.return_value = hidden
    module.language_model.get_output_embeddings.return_value = head
    recipe.require_plain_head(module)
    module.return_value = head(hidden).tanh()
    with pytest.raises(ValueError, match="Mock changes what its output layer returns"):
        recipe.require_plain_head(module)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model whose template marks answers, and chats."""
    make_chat_model(tmp_path / "my-model", MARKED)
    write_chats(tmp_path / "chats.jsonl", CHATS)
    return tmp_path


def losses(output: str) -> dict[int, float]:
    """Return the printed losses on held-out chats, by step."""
    return {int(step): float(loss) for step, loss in HELD_OUT_LOSS.findall(output)}


def loss_of_transformers(model: Any, folder: Path) -> float:
    """Return the model's own loss on the answers of the held-out chat."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "my-model")
    found = tokenizer.apply_chat_template(
        CHATS[0], return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
    )
    labels = found["input_ids"].masked_fill(torch.as_tensor(found["assistant_masks"]) == 0, -100)
    with torch.no_grad():
        return float(model(input_ids=found["input_ids"], labels=labels).loss)


# There are six chats to learn, and so three steps in an epoch.
KEEPING_ALL = ("--save-every", "2", "--keep", "-1")
OPTIONS = ("--precision", "32-true", "--accelerator", "cpu", "--epochs", "2", "--lr", "3e-3", "--accumulate", "2")


def test_trains_resumes_and_exports(run_example: Run, folder: Path) -> None:
    """The printed losses are those of transformers, and a run that was resumed in mid-epoch saves the same bits.

    It goes on in its folder, where last.ckpt stays the newest checkpoint. Another training may not begin there.
    """
    from transformers import AutoModelForCausalLM

    command = ("finetune_causal_lm.py", "my-model", "chats.jsonl")
    output = run_example(*command, "whole", *OPTIONS, *KEEPING_ALL)
    found = losses(output)
    assert list(found) == [0, 3, 6] and found[6] < found[0] and "What does drive 0 hold?\n> " in output
    for step, name in ((0, "my-model"), (6, "whole")):
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        assert loss_of_transformers(model, folder) == pytest.approx(found[step], abs=2e-5)
    resume = ("--run-dir", "runs/whole", "--resume", "runs/whole/checkpoints/step=2.ckpt")
    rest = run_example(*command, "resumed", *OPTIONS, *resume)
    assert losses(rest)[6] == found[6]
    assert_equal(weights_in(folder / "resumed"), weights_in(folder / "whole"))
    checkpoints = folder / "runs/whole/checkpoints"
    assert (checkpoints / "last.ckpt").resolve().name == "step=6.ckpt" and not list(checkpoints.glob("*-v1*"))
    refused = run_example(*command, "whole", *OPTIONS, status=1)
    assert "finetune_causal_lm: runs/whole/checkpoints holds the checkpoints of an earlier training" in refused
    ended = run_example(*command, "whole", *OPTIONS, "--resume", "runs/whole/checkpoints/last.ckpt", status=1)
    assert "is at its end already: raise --epochs" in ended


# ---- text and chats become windows and batches; mistakes in files are answered in a line; the model of bytes


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
    assert len(held_out) == 2 and not train & held_out and train | held_out == set(range(65, 91))
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
    assert sorted(whole[:7]) == sorted(whole[7:14]) == list(range(7)) and whole[:7] != whole[7:14]
    # Two ranks together see the windows that one rank would see.
    one = list(islice(sampler(8, seed=0, rank=0, num_ranks=1, start=0), 16))
    first, second = (list(islice(sampler(8, seed=0, rank=rank, num_ranks=2, start=0), 8)) for rank in (0, 1))
    assert [window for pair in zip(first, second, strict=True) for window in pair] == one


# It writes <think> only in the last answer, as Qwen3 does.
REWRITING = UNMARKED.replace(
    "{{ message.content }}",
    '{% if message.role == "assistant" and loop.last %}<think></think>{% endif %}{{ message.content }}',
)


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
        assert (
            tokenize(unmarked, chat, answers="all") == {"input_ids": expected["input_ids"], "labels": labels}
            and tokenize(marked, chat, answers="all")["labels"] == labels
        )
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
            json.dumps({"messages": [CHATS[0][1], {"role": "assistant", "text": "Memory."}]}),
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
    assert (
        second != first
        and sorted(chain(*first)) == sorted(chain(*second)) == list(range(1, 8))
        and seen(islice(stopped, position)) == first[:position]
    )
    resumed.load_state_dict(stopped.state_dict())
    assert ([] if position == len(first) else seen(resumed)) == first[position:] and seen(resumed) == second


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
    assert (
        torch.equal(batch["input_ids"], torch.tensor([[5, 6, 7], [8, 0, 0]]))
        and torch.equal(batch["attention_mask"], torch.tensor([[1, 1, 1], [1, 0, 0]]))
        and torch.equal(batch["labels"], torch.tensor([[-100, 6, 7], [8, -100, -100]]))
    )


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
