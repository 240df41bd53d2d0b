"""The recipe for causal language models: its loss beside torch's, and its commands as examples/README.md has them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.examples.folders import CHATS, MARKED, make_chat_model, write_chats
from tests.helpers.runif import RunIf

Example = Callable[[str], ModuleType]
Run = Callable[..., str]
WIDTH, VOCABULARY, TIME = 8, 1000, 64
HELD_OUT_LOSS = re.compile(r"step (\d+): held-out loss (\d+\.\d+)")


def loss_and_gradients(
    loss: Callable[[torch.Tensor, torch.Tensor, nn.Module], torch.Tensor], labels: torch.Tensor
) -> list[torch.Tensor]:
    """Return the loss, and the gradients of the hidden states and of the head's weight and bias."""
    torch.manual_seed(0)
    hidden = torch.randn(2, TIME // 2, WIDTH, requires_grad=True)
    head = nn.Linear(WIDTH, VOCABULARY)
    value = loss(hidden, labels, head)
    value.backward()
    return [value.detach(), hidden.grad, head.weight.grad, head.bias.grad]  # type: ignore[list-item]


def whole_cross_entropy(hidden: torch.Tensor, labels: torch.Tensor, head: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("num_labels", [TIME, 40, 3])
@pytest.mark.parametrize("num_chunks", [1, 8])
def test_loss_in_chunks_is_that_of_torch(example: Example, num_labels: int, num_chunks: int) -> None:
    """Loss and gradients equal those of torch's cross_entropy over all logits, also with fewer labels than chunks."""
    labels = torch.full((TIME,), -100)
    labels[torch.randperm(TIME)[:num_labels]] = torch.randint(0, VOCABULARY, (num_labels,))
    labels = labels.view(2, -1)
    chunked = example("causal_lm").chunked_cross_entropy
    found = loss_and_gradients(lambda *given: chunked(*given, num_chunks=num_chunks), labels)
    for value, expected in zip(found, loss_and_gradients(whole_cross_entropy, labels), strict=True):
        torch.testing.assert_close(value, expected)


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(one.numel() for one in tree_leaves(returned) if isinstance(one, torch.Tensor))])
        return returned


def test_logits_are_never_whole(example: Example) -> None:
    """In forward and backward no tensor is larger than the logits of one chunk, or the head's weight."""
    labels = torch.randint(0, VOCABULARY, (2, TIME // 2))
    chunked = example("causal_lm").chunked_cross_entropy
    with LargestTensor() as whole:
        loss_and_gradients(whole_cross_entropy, labels)
    with LargestTensor() as largest:
        loss_and_gradients(lambda *given: chunked(*given, num_chunks=8), labels)
    assert whole.numel == TIME * VOCABULARY
    assert largest.numel == TIME * VOCABULARY // 8 == WIDTH * VOCABULARY


def test_model_that_caps_its_logits(example: Example) -> None:
    """A model whose logits are not those of its output layer is refused by name."""
    recipe = example("causal_lm")
    head = nn.Linear(WIDTH, VOCABULARY)

    class Module(nn.Module):
        device = torch.device("cpu")
        language_model = SimpleNamespace(get_output_embeddings=lambda: head)

        def __init__(self, cap: float) -> None:
            super().__init__()
            self.cap = cap

        def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(tokens, WIDTH).float()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = head(self.hidden(tokens))
            return self.cap * torch.tanh(logits / self.cap)

    recipe.require_plain_head(Module(1e6))
    with pytest.raises(ValueError, match="SimpleNamespace changes what its output layer returns"):
        recipe.require_plain_head(Module(0.1))


@pytest.mark.parametrize(
    ("resumed", "refused"),
    [
        (None, True),
        ("run/checkpoints/last.ckpt", False),
        ("other/checkpoints/last.ckpt", True),
    ],
)
def test_folder_with_checkpoints(example: Example, tmp_path: Path, resumed: str | None, refused: bool) -> None:
    """Only the training that is resumed may add to them; an empty folder takes every training."""
    recipe = example("finetune_causal_lm")
    path = None if resumed is None else str(tmp_path / resumed)
    folder = tmp_path / "run/checkpoints"
    recipe.require_own_folder(folder, path)
    (folder / "step=3.ckpt").mkdir(parents=True)
    (folder / "last.ckpt").symlink_to("step=3.ckpt")
    if refused:
        with pytest.raises(ValueError, match=r"--resume .*/run/checkpoints/last\.ckpt.*--run-dir"):
            recipe.require_own_folder(folder, path)
    else:
        recipe.require_own_folder(folder, path)


def test_checkpoint_that_does_not_exist(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    """The script says so before it loads anything."""
    with pytest.raises(SystemExit):
        example("finetune_causal_lm").parse(["my-model", "chats.jsonl", "out", "--resume", "nope.ckpt"])
    assert "--resume nope.ckpt: no such checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["finetune_causal_lm", "finetune_encoder"])
def test_without_transformers(example: Example, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """The scripts say what to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=rf"{script}: .*transformers.*pip install '\.\[huggingface\]'"):
        example(script)


def test_command_line_without_jsonargparse(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script says what to install."""
    cli = example("cli")
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install '\.\[cli\]'"):
        cli.main(["fit"])


def test_adapters_without_peft(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    recipe = example("causal_lm")
    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install peft"):
        recipe.CausalLM("my-model", lora_rank=4)


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


@RunIf(package="peft")
@pytest.mark.long
def test_adapters_train_resume_and_load(run_example: Run, folder: Path) -> None:
    """PEFT loads the saved adapters, whose loss is the printed one, and the training begins with the model's own."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    command = ("finetune_causal_lm.py", "my-model", "chats.jsonl")
    found = losses(run_example(*command, "adapters", *OPTIONS, *KEEPING_ALL, "--lora", "4"))
    base = AutoModelForCausalLM.from_pretrained(folder / "my-model", dtype=torch.float32)
    assert found[0] == pytest.approx(loss_of_transformers(base, folder), abs=2e-5)
    assert found[6] < found[0]
    saved = weights(folder / "adapters")
    assert saved and all(".lora_" in name for name in saved)
    assert json.loads((folder / "adapters/adapter_config.json").read_text())["r"] == 4
    tuned = PeftModel.from_pretrained(base, folder / "adapters")
    assert loss_of_transformers(tuned, folder) == pytest.approx(found[6], abs=2e-5)
    merged = tuned.merge_and_unload()
    assert loss_of_transformers(merged, folder) == pytest.approx(found[6], abs=1e-4)
    options = ("--lora", "4", "--run-dir", "resumed-run", "--resume", IN_MID_EPOCH.format("adapters"))
    run_example(*command, "resumed", *OPTIONS, *options)
    other = run_example(*command, "full", *OPTIONS, "--resume", IN_MID_EPOCH.format("adapters"), status=1)
    assert "finetune_causal_lm: The checkpoint's parameters differ from the model's" in other
    assert "Traceback" not in other
    assert all(torch.equal(value, saved[name]) for name, value in weights(folder / "resumed").items())


def test_bad_chats_are_named_before_a_model_is_built(run_example: Run, folder: Path) -> None:
    """The script ends with the message, and writes nothing."""
    (folder / "chats.jsonl").write_text("hello\n")
    output = run_example("finetune_causal_lm.py", "my-model", "chats.jsonl", "out", status=1)
    assert "finetune_causal_lm: chats.jsonl:1 is no chat" in output
    assert sorted(path.name for path in folder.iterdir()) == ["chats.jsonl", "my-model"]
