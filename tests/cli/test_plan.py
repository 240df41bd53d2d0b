"""The command ``smart-infinity plan``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.cli.plan_recipe import python_recipe, yaml_recipe
from lightning_smartinfinity.planning.training import Training
from tests.cli.conftest import Cli
from tests.helpers.model_folder import llama_config
from tests.training.small import Small

MACHINE = ["--gpu-memory", "24GB", "--host-memory", "64GB", "--disk", "2TB", "--cores", "16"]
SMALL = ["--gpu-memory", "none", "--host-memory", "8GiB", "--disk", "10GB", "--cores", "2"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    llama_config().save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.fixture
def planned(cli: Cli) -> Callable[..., Any]:
    """A function that plans and returns the plan from JSON."""
    return lambda *arguments, status=0: json.loads(cli("plan", *arguments, "--json", status=status).out)


BUDGETS = ["--offload-param", "nvme", "--gradient-bytes", "1GB", "--parameter-bytes", "2GB"]
BUDGETS += ["--dram-cache-bytes", "3GB", "--build", "configure_model"]
NODES = ["--nodes", "3", "--network", "1GB", "--drives", "2", "--tbw", "100"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            ["MODEL", *SMALL, "--tokens", "1e12", "--tbw", "1"],
            [
                "It fits.",
                "Life of the drive (1 TB",
                "more than the 1 TB that the drive may write",
                "(not measured)",
                "You need no storage: AdamW in memory fits",
                "Hours of the training",
                "SmartInfinityStrategy(",
                "class_path",
            ],
            id="a small model",
        ),
        pytest.param(
            ["MODEL", *MACHINE, "--offload-param", "nvme"],
            ["It may be faster with offload_param='none'", "zero={'offload_param': {'device': 'nvme'}}"],
            id="settings that fit stay as asked",
        ),
        pytest.param(["MODEL", *SMALL[:-2]], ["Looked up on this machine: cores\n"], id="what was looked up"),
        pytest.param(
            ["tests.planning.survey.models_of_users:Plain", *SMALL],
            ["It fits as far as is known: activations were not counted."],
            id="no activations",
        ),
        pytest.param(
            ["20M", *MACHINE, *NODES, "--compression", "BlockScaled"],
            [
                "import BlockScaled, SmartInfinityStrategy\n",
                "compression=BlockScaled(),",
                '"class_path": "lightning_smartinfinity.BlockScaled"',
                "1 process(es) on each of 3 machines",
                "  network     0.",
                "    num_nodes=3,\n",
                "  num_nodes: 3\n",
                "Life of the 2 drives (200 TB",
            ],
            id="a codec, and several machines, whose drives live longer together",
        ),
        pytest.param(
            ["20M", *MACHINE, *BUDGETS],
            ["transfer={'gradient_bytes': 1000000000, 'parameter_bytes': 2000000000, 'dram_cache_bytes': 3000000000}"],
            id="budgets",
        ),
    ],
)
def test_what_is_told(arguments: list[str], words: list[str], folder: str, cli: Cli) -> None:
    """The report says what fits, and the recipe has the settings."""
    seq = ["--seq", "16"] if arguments[0] in ("MODEL", "20M") else []
    printed = cli("plan", *(folder if each == "MODEL" else each for each in arguments), *seq).out
    assert [each for each in words if each not in printed] == []


def test_what_breaks_is_named(folder: str, planned: Any, cli: Cli) -> None:
    """Exit status 3: nothing fits on a disk of a megabyte, and the optimizer state is the largest part there."""
    printed = cli("plan", folder, *SMALL, "--seq", "16", "--disk", "1MB", status=3).out
    assert "It does not fit as asked:\n  disk (in all) needs" in printed
    assert "No combination fits" in printed
    assert "It lacks the least with " in printed and "state_format='int8'" in printed
    found = planned(folder, *SMALL, "--seq", "16", "--disk", "1MB", status=3)
    assert not found["best"]["fits"]
    assert [(each["place"], each["owner"]) for each in found["asked"]["broken"]] == [("disk", "optimizer state")]


def test_json_has_bytes_by_owner(folder: str, planned: Any) -> None:
    """Every need is the sum of its owners; a machine's sizes are those that were given."""
    found = planned(folder, *MACHINE, "--seq", "16")
    assert found["machine"]["gpu_memory"] == 24 * 10**9
    assert {(each["place"], each["phase"]) for each in found["asked"]["needs"]} == {
        ("gpu", "building"),
        ("gpu", "training"),
        ("host", "building"),
        ("host", "training"),
        ("host", "saving"),
        ("disk", "in all"),
    }
    for each in found["asked"]["needs"]:
        assert each["bytes"] == sum(each["owners"].values())


def test_several_models_make_a_table(cli: Cli) -> None:
    """Each model has a row of as many cells as the heading, and is named when its plan begins."""
    printed = cli("plan", "20M", "40M", *MACHINE, "--seq", "16")
    assert [line for line in printed.err.splitlines() if line.startswith("Planning")] == [
        "Planning 20M ...",
        "Planning 40M ...",
    ]
    lines = printed.out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 20M", "| 40M"]
    assert len({line.count("|") for line in lines}) == 1


def test_activation_checkpoints_of_a_class_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: Any
) -> None:
    """A class that turns them on itself is planned as with --checkpointing."""
    monkeypatch.chdir(tmp_path)
    llama_config().save_pretrained(tmp_path / "my-model")
    found = planned("tests.planning.survey.models_of_users:Loading", *SMALL, "--seq", "16")
    assert found["asked"]["training"]["checkpointing"] is True
    assert found["asked"]["needs"] == planned("my-model", *SMALL, "--seq", "16", "--checkpointing")["asked"]["needs"]


def test_a_tight_plan_says_so(planned: Any, cli: Cli) -> None:
    """The report and the table name the place of which less than a tenth is left, and what leaves more."""
    needs = planned("300M", *MACHINE, "--build", "configure_model")["asked"]["needs"]
    most = max(each["bytes"] for each in needs if each["place"] == "host")
    narrow = [*MACHINE, "--build", "configure_model", "--host-memory", f"{most * 100 // 95 // 10**6}MB"]
    found = planned("300M", *narrow)
    assert found["asked"]["fits"] and {each["place"] for each in found["asked"]["tight"]} == {"host"}
    assert not found["best"]["tight"]
    printed = cli("plan", "300M", *narrow).out
    assert "It fits, but takes 95 % of host memory.\nA tenth of the memory stays free with gradient_bytes=" in printed
    least = ["--gpu-memory", "24GB", "--host-memory", "2250MB", "--disk", "2TB", "--cores", "16", "--seq", "16"]
    assert re.search(r"\| [^|]*, but takes 9\d % of host memory \|", cli("plan", "20M", "1M", *least).out)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--host-memory", "24 gigs"],
        ["--init-args", "[1]"],
        ["--init-args", "[" * 100_000],
        ["--batch", "0"],
        ["--storage", "s3://bucket/run"],
        ["--gpu-memory", "big"],
        ["--gpu-memory", "24"],
        ["--gpu-memory", "0"],
        ["--gpu-memory", "9" * 400],
        ["--drive-read", "0"],
        ["--save-top-k", "-1"],
        ["--gpus", "999999"],
    ],
)
def test_bad_options_name_a_remedy(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Argparse's error holds the text and the rule's remedy."""
    with pytest.raises(SystemExit) as caught:
        main(["plan", "7B", *wrong])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert repr(wrong[1][:40]) in printed and "Pass " in printed


@pytest.mark.parametrize(
    ("compression", "payload", "residual"),
    [("1", None, 0), ("BlockScaled", 1 + 1 / 256, 4)],
)
def test_compressed_gradients(compression: str, payload: float | None, residual: int, planned: Any) -> None:
    """8 bits take a byte each and a scale for each block; a residual 4 bytes of memory and 8 of disk per parameter.

    It is written at every step. There is none if all gradients are sent.
    """
    plain, found = (planned("20M", *MACHINE, *more)["asked"] for more in ([], ["--compression", compression]))
    owners = {(need["place"], need["phase"]): need["owners"] for need in found["needs"]}
    training, of_disk = owners["host", "training"], owners["disk", "in all"]
    assert training.get("residual", 0) == pytest.approx(residual * 20e6, rel=0.1)
    assert training["payloads"] > 0 and "payloads" not in owners["host", "building"]
    assert payload is None or training["payloads"] == pytest.approx(payload * 20e6, rel=0.1)
    assert of_disk.get("residuals", 0) == pytest.approx(2 * residual * 20e6, rel=0.1)
    assert found["written_bytes"] - plain["written_bytes"] == pytest.approx(residual * 20e6, rel=0.1)


def test_budgets(planned: Any) -> None:
    """What a process holds follows from them, and the rest of the gradients is on the disk."""
    found = planned("1B", *MACHINE, *BUDGETS)["asked"]
    owners = {(need["place"], need["phase"]): need["owners"] for need in found["needs"]}
    held = owners["host", "training"]
    expected = {"gradient_arena": 1e9, "parameter buffers": 2e9, "state in memory": 3e9}
    assert {name: held[name] for name in expected} == pytest.approx(expected, rel=0.05)
    assert owners["disk", "in all"]["gradients"] == pytest.approx(2 * 1e9, rel=0.1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--gradient-bytes", "2MB"], r"--gradient-bytes 2000000: \d+ bytes of gradients .* at least \d+MB"),
        (
            ["--offload-param", "nvme", "--parameter-bytes", "2MB"],
            r"--parameter-bytes 2000000: \d+ bytes of parameters .* at least \d+MB",
        ),
        (["--parameter-bytes", "2GB"], "Use offload_param='nvme'"),
        (["--gradient-bytes", "1GB", "--compression", "0.1"], "Compressed gradients are all in memory"),
        (["--processes", "4"], "Pass --gpus 4"),
        (["--init-args", "{}"], "are for a class"),
        (["--storage", __file__], "is no folder"),
        (["--gpus", "2", "--gpu-memory", "none"], "Pass --gpu-memory"),
    ],
)
def test_what_is_refused(wrong: list[str], words: str, cli: Cli) -> None:
    """Exit status 1, and the message says how much is needed, or names the option."""
    assert re.search(words, cli("plan", "20M", *MACHINE, *wrong, status=1).err)


CHANGED = Training(
    offload_param="nvme",
    state_format="int8",
    accumulate=2,
    checkpointing=True,
    build="configure_model",
    compression=0.25,
    asynchronous=False,
)


@pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain")
@pytest.mark.parametrize("language", ["python", "yaml"])
def test_the_recipe_trains(language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed Python runs as it is; LightningCLI makes the same strategy and Trainer of the printed YAML."""
    monkeypatch.chdir(tmp_path)
    if language == "python":
        names: dict[str, Any] = {}
        exec(python_recipe(CHANGED, storage=tmp_path / "storage", on_gpu=False), names)
        trainer = names["trainer"]
    else:
        (tmp_path / "plan.yaml").write_text(yaml_recipe(CHANGED, storage=tmp_path / "storage", on_gpu=False))
        trainer = LightningCLI(Small, run=False, args=["--config", "plan.yaml"], save_config_callback=None).trainer
    trainer.fit_loop.max_epochs = 1
    trainer.fit(Small())
    strategy = trainer.strategy
    assert isinstance(strategy, SmartInfinityStrategy)
    assert strategy.config["zero_optimization"]["offload_param"]["device"] == "nvme"
    assert strategy.state_bytes > 0 and strategy.host_bytes["residual"] > 0
    assert not strategy._settings.transfer.asynchronous
    assert trainer.global_step == 2
    strategy.close()
