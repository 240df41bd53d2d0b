"""The command ``smart-infinity plan``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.cli.plan_recipe import python_recipe, yaml_recipe
from lightning_smartinfinity.planning.training import Training
from tests.helpers.model_folder import llama_config
from tests.helpers.models import TinyGPT

MACHINE = ["--gpu-memory", "24GB", "--host-memory", "64GB", "--disk", "2TB", "--cores", "16"]
SMALL = ["--gpu-memory", "none", "--host-memory", "8GiB", "--disk", "10GB", "--cores", "2"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    llama_config().save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    assert main(["plan", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_a_small_model_fits(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The report says so, marks what was not measured, and says that no storage is needed."""
    assert main(["plan", folder, *SMALL, "--seq", "16", "--tokens", "1e6"]) == 0
    printed = capsys.readouterr().out
    assert "It fits." in printed
    assert "(not measured)" in printed
    assert "You need no storage: AdamW in memory fits" in printed
    assert "Hours of the training" in printed
    assert "SmartInfinityStrategy(" in printed and "class_path" in printed


def test_what_breaks_is_named(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 3: nothing fits on a disk of a megabyte, and the optimizer state is the largest part there."""
    assert main(["plan", folder, *SMALL, "--seq", "16", "--disk", "1MB"]) == 3
    printed = capsys.readouterr().out
    assert "It does not fit as asked:\n  disk (in all) needs" in printed
    assert "No combination fits" in printed
    assert "It lacks the least with " in printed and "state_format='int8'" in printed
    found = planned(capsys, folder, *SMALL, "--seq", "16", "--disk", "1MB", status=3)
    assert not found["best"]["fits"]
    assert [(each["place"], each["owner"]) for each in found["asked"]["broken"]] == [("disk", "optimizer state")]


def test_json_has_bytes_by_owner(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every need is the sum of its owners; a machine's sizes are those that were given."""
    found = planned(capsys, folder, *MACHINE, "--seq", "16")
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


def test_several_models_make_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Each model has a row of as many cells as the heading, and is named when its plan begins."""
    assert main(["plan", "20M", "40M", *MACHINE, "--seq", "16"]) == 0
    printed = capsys.readouterr()
    assert [line for line in printed.err.splitlines() if line.startswith("Planning")] == [
        "Planning 20M ...",
        "Planning 40M ...",
    ]
    lines = printed.out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 20M", "| 40M"]
    assert len({line.count("|") for line in lines}) == 1


def test_several_machines_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan names them, their network and their drives, which live longer together, and so does the recipe."""
    lives = []
    for more in ([], ["--nodes", "3", "--network", "1GB", "--drives", "2", "--tbw", "100"]):
        assert main(["plan", "20M", *MACHINE, "--seq", "16", "--tbw", "100", *more]) == 0
        printed = capsys.readouterr().out
        lives += [line for line in printed.splitlines() if line.startswith("Life of the")]
    assert "1 process(es) on each of 3 machines" in printed and "  network     0." in printed
    assert "    num_nodes=3,\n" in printed and "  num_nodes: 3\n" in printed
    assert "Life of the drive (100 TB" in lives[0] and "Life of the 2 drives (200 TB" in lives[1]


def test_settings_that_fit_are_printed_as_asked(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe has the settings that were asked for, and the report only hints at faster ones."""
    assert main(["plan", folder, *MACHINE, "--seq", "16", "--offload-param", "nvme"]) == 0
    printed = capsys.readouterr().out
    assert "It may be faster with offload_param='none'" in printed
    assert "zero={'offload_param': {'device': 'nvme'}}" in printed


def test_what_was_looked_up_is_told(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes that were not given are those of this machine, and the report names them."""
    assert main(["plan", folder, *MACHINE[:4], "--seq", "16"]) in (0, 3)
    assert "Looked up on this machine: disk, cores\n" in capsys.readouterr().out


def test_a_worn_out_drive_is_told(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The drive of the plan may write less than the training does."""
    assert main(["plan", folder, *SMALL, "--seq", "16", "--tokens", "1e12", "--tbw", "1"]) == 0
    assert "more than the 1 TB that the drive may write" in capsys.readouterr().out


def test_activation_checkpoints_of_a_class_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A class that turns them on itself is planned as with --checkpointing."""
    monkeypatch.chdir(tmp_path)
    llama_config().save_pretrained(tmp_path / "my-model")
    found = planned(capsys, "tests.planning.survey.models_of_users:Loading", *SMALL, "--seq", "16")
    assert found["asked"]["training"]["checkpointing"] is True
    assert (
        found["asked"]["needs"]
        == planned(capsys, "my-model", *SMALL, "--seq", "16", "--checkpointing")["asked"]["needs"]
    )


def test_gradients_in_8_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """They take a byte each and a scale for each block of 256, beside a residual; the recipe names the codec."""
    found = planned(capsys, "20M", *MACHINE, "--compression", "BlockScaled")["asked"]
    of_host = {need["phase"]: need["owners"] for need in found["needs"] if need["place"] == "host"}
    assert of_host["training"]["payloads"] == pytest.approx(20e6 * (1 + 1 / 256), rel=0.1)
    assert of_host["training"]["residual"] == pytest.approx(4 * 20e6, rel=0.1)
    assert main(["plan", "20M", *MACHINE, "--compression", "BlockScaled"]) == 0
    printed = capsys.readouterr().out
    assert "import BlockScaled, SmartInfinityStrategy\n" in printed and "compression=BlockScaled()," in printed
    assert '"class_path": "lightning_smartinfinity.BlockScaled"' in printed


def test_a_tight_plan_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The report and the table name the place of which less than a tenth is left, and what leaves more."""
    needs = planned(capsys, "1B", *MACHINE, "--build", "configure_model")["asked"]["needs"]
    most = max(each["bytes"] for each in needs if each["place"] == "host")
    narrow = [*MACHINE, "--build", "configure_model", "--host-memory", f"{most * 100 // 95 // 10**6}MB"]
    found = planned(capsys, "1B", *narrow)
    assert found["asked"]["fits"] and {each["place"] for each in found["asked"]["tight"]} == {"host"}
    assert not found["best"]["tight"]
    assert main(["plan", "1B", *narrow]) == 0
    printed = capsys.readouterr().out
    assert "It fits, but takes 95 % of host memory.\nA tenth of the memory stays free with gradient_bytes=" in printed
    least = ["--gpu-memory", "24GB", "--host-memory", "2250MB", "--disk", "2TB", "--cores", "16", "--seq", "16"]
    assert main(["plan", "20M", "1M", *least]) == 0
    assert re.search(r"\| [^|]*, but takes 9\d % of host memory \|", capsys.readouterr().out)


@pytest.mark.parametrize("ratio", ["0.01", "1"])
def test_compressed_gradients(ratio: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A residual takes 4 bytes of memory and 8 of disk per parameter, and is written at every step.

    There is none if all gradients are sent.
    """
    plain = planned(capsys, "20M", *MACHINE)["asked"]
    found = planned(capsys, "20M", *MACHINE, "--compression", ratio)["asked"]
    numel = 4 * 20e6 if ratio == "0.01" else 0
    of_host = {need["phase"]: need["owners"] for need in found["needs"] if need["place"] == "host"}
    (of_disk,) = [need["owners"] for need in found["needs"] if need["place"] == "disk"]
    assert of_host["training"].get("residual", 0) == pytest.approx(numel, rel=0.1)
    assert of_host["training"]["payloads"] > 0 and "payloads" not in of_host["building"]
    assert of_disk.get("residuals", 0) == pytest.approx(2 * numel, rel=0.1)
    assert found["written_bytes"] - plain["written_bytes"] == pytest.approx(numel, rel=0.1)


def test_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    """What a process holds follows from them, the rest of the gradients is on the disk, and the recipe names them."""
    given = ["--offload-param", "nvme", "--gradient-bytes", "1GB", "--parameter-bytes", "2GB"]
    given += ["--dram-cache-bytes", "3GB", "--build", "configure_model"]
    found = planned(capsys, "7B", *MACHINE, *given)["asked"]
    of_host = {need["phase"]: need["owners"] for need in found["needs"] if need["place"] == "host"}
    (of_disk,) = [need["owners"] for need in found["needs"] if need["place"] == "disk"]
    assert of_host["training"]["gradient_arena"] == pytest.approx(1e9, rel=0.05)
    assert of_host["training"]["parameter buffers"] == pytest.approx(2e9, rel=0.01)
    assert of_host["training"]["state in memory"] == pytest.approx(3e9, rel=0.01)
    assert of_disk["gradients"] == pytest.approx(2 * 7e9, rel=0.1)
    assert main(["plan", "7B", *MACHINE, *given]) == 0
    printed = capsys.readouterr().out
    budgets = {"gradient_bytes": 10**9, "parameter_bytes": 2 * 10**9, "dram_cache_bytes": 3 * 10**9}
    assert f"transfer={budgets!r}" in printed


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
    ],
)
def test_budgets_that_cannot_be_kept(wrong: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1, and the message says how much is needed."""
    assert main(["plan", "7B", *MACHINE, *wrong]) == 1
    assert re.search(words, capsys.readouterr().err)


def test_a_plan_without_activations_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """It fits only as far as is known."""
    assert main(["plan", "tests.planning.survey.models_of_users:Plain", *SMALL]) == 0
    assert "It fits as far as is known: activations were not counted." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--processes", "4"], "Pass --gpus 4"),
        (["--init-args", "{}"], "are for a class"),
        (["--storage", __file__], "is no folder"),
    ],
)
def test_contradictions_are_refused(wrong: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1, and the message names the option."""
    assert main(["plan", "20M", *MACHINE, *wrong]) == 1
    assert words in capsys.readouterr().err


def test_gpus_of_unknown_memory_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """There is no GPU here whose memory could be taken."""
    assert main(["plan", "20M", "--gpus", "2", "--gpu-memory", "none"]) == 1
    assert "Pass --gpu-memory" in capsys.readouterr().err


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


def test_a_missing_folder_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1, and the message names what can be passed."""
    assert main(["plan", "no/such/folder"]) == 1
    assert "such as 7B or 124M" in capsys.readouterr().err


CHANGED = Training(
    offload_param="nvme",
    state_format="int8",
    accumulate=2,
    checkpointing=True,
    build="configure_model",
    compression=0.25,
    asynchronous=False,
)
NO_GAIN = pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain")


class Module(L.LightningModule):
    """Trains a tiny model on constants."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyGPT()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.model(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros((4, 8), dtype=torch.long), batch_size=1)


@NO_GAIN
def test_the_python_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed Python runs as it is, and its Trainer trains."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(python_recipe(CHANGED, storage=tmp_path / "storage", on_gpu=False), names)
    trainer, strategy = names["trainer"], names["strategy"]
    trainer.fit_loop.max_epochs = 1
    trainer.fit(Module())
    assert trainer.global_step == 2
    assert strategy.parameter_bytes >= 0 and strategy.state_bytes > 0
    assert strategy.host_bytes["residual"] > 0
    assert not strategy._settings.transfer.asynchronous
    strategy.close()


@NO_GAIN
def test_the_yaml_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI makes the same strategy and the same Trainer of the printed YAML, and it trains."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(yaml_recipe(CHANGED, storage=tmp_path / "storage", on_gpu=False))
    options = ["--config", "plan.yaml", "--trainer.max_epochs", "1"]
    cli = LightningCLI(Module, run=False, args=options, save_config_callback=None)
    cli.trainer.fit(cli.model)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, SmartInfinityStrategy)
    assert strategy.config["zero_optimization"]["offload_param"]["device"] == "nvme"
    assert strategy.host_bytes["residual"] > 0
    assert not strategy._settings.transfer.asynchronous
    assert cli.trainer.global_step == 2
    strategy.close()
