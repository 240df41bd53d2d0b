"""The recipes as a user starts them, at their smallest size: what they train and save, and bad command lines."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
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
from tests.examples.folders import CHATS, MARKED, make_chat_model, make_encoder, write_chats

Run = Callable[..., str]
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
    assert checkpoint in output
    assert (tmp_path / "disk1").is_dir()
    resumed = run_example("finetune_text.py", *options, "--max-steps", "6", "--resume", checkpoint)
    assert "2 steps in" in resumed
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
    example: Callable[[str], ModuleType],
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
    assert ended.value.code not in (0, None)
    assert message in f"{ended.value.code}{capsys.readouterr().err}"
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


Example = Callable[[str], ModuleType]
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
    assert "36 passages learnt, 12 held out, of 2 labels: one, two" in output
    assert 0 < frozen <= 100
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


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(next(folder.glob("*.safetensors")))


# There are six chats to learn, and so three steps in an epoch.
KEEPING_ALL = ("--save-every", "2", "--keep", "-1")
IN_MID_EPOCH = "runs/{}/checkpoints/step=2.ckpt"
OPTIONS = ("--precision", "32-true", "--accelerator", "cpu", "--epochs", "2", "--lr", "3e-3", "--accumulate", "2")


def test_trains_resumes_and_exports(run_example: Run, folder: Path) -> None:
    """The printed losses are those of transformers, and a run that was resumed in mid-epoch saves the same bits.

    It goes on in its folder, where last.ckpt stays the newest checkpoint. Another training may not begin there.
    """
    from transformers import AutoModelForCausalLM

    command = ("finetune_causal_lm.py", "my-model", "chats.jsonl")
    output = run_example(*command, "whole", *OPTIONS, *KEEPING_ALL)
    found = losses(output)
    assert list(found) == [0, 3, 6]
    assert found[6] < found[0]
    assert "What does drive 0 hold?\n> " in output
    for step, name in ((0, "my-model"), (6, "whole")):
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        assert loss_of_transformers(model, folder) == pytest.approx(found[step], abs=2e-5)
    resume = ("--run-dir", "runs/whole", "--resume", IN_MID_EPOCH.format("whole"))
    rest = run_example(*command, "resumed", *OPTIONS, *resume)
    assert losses(rest)[6] == found[6]
    expected = weights(folder / "whole")
    assert all(torch.equal(value, expected[name]) for name, value in weights(folder / "resumed").items())
    checkpoints = folder / "runs/whole/checkpoints"
    assert (checkpoints / "last.ckpt").resolve().name == "step=6.ckpt"
    assert not list(checkpoints.glob("*-v1*"))
    refused = run_example(*command, "whole", *OPTIONS, status=1)
    assert "finetune_causal_lm: runs/whole/checkpoints holds the checkpoints of an earlier training" in refused
    ended = run_example(*command, "whole", *OPTIONS, "--resume", "runs/whole/checkpoints/last.ckpt", status=1)
    assert "is at its end already: raise --epochs" in ended
