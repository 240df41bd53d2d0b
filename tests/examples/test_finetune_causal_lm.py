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
    recipe, head = example("causal_lm"), nn.Linear(WIDTH, VOCABULARY)

    class Module(nn.Module):
        device = torch.device("cpu")
        language_model = SimpleNamespace(get_output_embeddings=lambda: head)
        cap = 1e6

        def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(tokens, WIDTH).float()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.cap * torch.tanh(head(self.hidden(tokens)) / self.cap)

    module = Module()
    recipe.require_plain_head(module)
    module.cap = 0.1
    with pytest.raises(ValueError, match="SimpleNamespace changes what its output layer returns"):
        recipe.require_plain_head(module)


def test_what_is_missing(example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The scripts say what to install, and that a checkpoint does not exist, before they load anything."""
    with pytest.raises(SystemExit):
        example("finetune_causal_lm").parse(["my-model", "chats.jsonl", "out", "--resume", "nope.ckpt"])
    assert "--resume nope.ckpt: no such checkpoint" in capsys.readouterr().err
    for module in ("cli", "causal_lm"):
        monkeypatch.setattr(example(module), "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install '\.\[cli\]'"):
        example("cli").main(["fit"])
    with pytest.raises(ValueError, match="pip install peft"):
        example("causal_lm").CausalLM("my-model", lora_rank=4)


@pytest.mark.parametrize("script", ["finetune_causal_lm", "finetune_encoder"])
def test_without_transformers(example: Example, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """The scripts say what to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=rf"{script}: .*transformers.*pip install '\.\[huggingface\]'"):
        example(script)


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
