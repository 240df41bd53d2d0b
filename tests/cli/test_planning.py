"""The commands ``smart-infinity simulate`` and ``smart-infinity plan``."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.cli.plan_recipe import python_recipe, yaml_recipe
from lightning_smartinfinity.cli.simulation.command import _cases
from lightning_smartinfinity.cli.simulation.options import add_options
from lightning_smartinfinity.cli.simulation.steps import Case
from lightning_smartinfinity.errors import SmartInfinityError
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.planning.paper.fit import fit
from lightning_smartinfinity.planning.simulator.gradients import Dense
from lightning_smartinfinity.planning.simulator.step import System, simulate_step
from lightning_smartinfinity.planning.simulator.workload import Workload
from lightning_smartinfinity.planning.training import Training
from lightning_smartinfinity.settings import HOST_TASKLET_BYTES
from lightning_smartinfinity.settings.strategy import StrategySettings
from tests.cli.conftest import Cli
from tests.helpers.model_folder import llama_config
from tests.training.small import Small

Simulated = Callable[..., Any]
PAGE = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()


@pytest.fixture
def simulated(cli: Cli) -> Simulated:
    """A function that simulates and returns what JSON has."""
    return lambda *arguments: json.loads(cli("simulate", *arguments, "--json").out)


def test_prints_a_row_for_every_combination(cli: Cli) -> None:
    """Combinations that a system lacks are left out. The seconds are those of the simulator."""
    arguments = ["--parameters", "1e9", "2e9", "--devices", "2", "4", "--systems", "zero-infinity", "smartssd"]
    head, *lines = cli("simulate", *arguments, "--overlap", "none", "forward").out.partition("\n\n")[0].splitlines()
    assert head.split()[:6] == ["parameters", "devices", "system", "state", "gradients", "overlap"]
    rows = [tuple(line.split()) for line in lines]
    assert {len(line) for line in (head, *lines)} == {len(head)}
    wanted = [("zero-infinity", "none"), ("smartssd", "none"), ("smartssd", "forward")]
    assert {(row[0], row[1], row[2], row[5]) for row in rows} == {
        (size, number, *of) for size, number, of in product(("1e9", "2e9"), "24", wanted)
    }
    assert len(rows) == 12
    step = simulate_step(fit(duplex=False).machine(4), Workload(numel=2 * 10**9, gradients=Dense(2)), System.CARDS)
    (row,) = [row for row in rows if row[:3] == ("2e9", "4", "smartssd") and row[5] == "none"]
    assert row[-4:] == tuple(f"{part:.2f}" for part in (step.forward, step.backward, step.update, step.step))


def test_memory_of_this_package(simulated: Simulated, cli: Cli) -> None:
    """Memory is listed by purpose, once for all overlaps, in GiB, and in JSON in bytes."""
    of = ["--parameters", "1073741824", "--devices", "2", "--systems", "su+o", "smartssd", "host"]
    of += ["--compression", "none", "0.01", "--overlap", "none", "forward"]
    title, head, *lines = cli("simulate", *of).out.partition("\n\n")[2].splitlines()
    assert "GiB" in title and head.split()[-4:] == ["arena", "ring", "payloads", "residual"]
    listed = [(cells[2], cells[-4], cells[-1]) for cells in map(str.split, lines)]
    assert listed == [("smartssd", "2.00", "0.00"), ("smartssd", "2.00", "4.00"), ("host", "2.00", "0.00")]
    held = {(row["system"], row["ratio"]): row["host_bytes"] for row in simulated(*of, "--no-error-feedback")["rows"]}
    assert held["su+o", None] == {} and set(held["smartssd", 0.01]) == {"gradient_arena", "ring", "payloads"}
    assert held["smartssd", 0.01]["payloads"] == pytest.approx(0.04 * 2**30, rel=0.01)
    assert held["host", None]["ring"] == pytest.approx(16 * HOST_TASKLET_BYTES, rel=0.01)


def test_json_is_as_documented(simulated: Simulated) -> None:
    """docs/simulation.md lists exactly the fields of the JSON output."""
    of = ["--parameters", "1e6", "--devices", "2", "--systems", "zero-infinity", "smartssd", "host"]
    of += ["--optimizer", "sgd"]
    found = simulated(*of, "--compression", "none", "0.01", "--gpu", "A100", "--dtype", "fp16")

    def fields(value: Any, name: str = "") -> set[str]:
        if isinstance(value, dict):
            return set().union(*(fields(of, f"{name}.{key}".strip(".")) for key, of in value.items()))
        return set().union(*(fields(one, f"{name}[]") for one in value)) if isinstance(value, list) else {name}

    listed = PAGE.partition("| field |")[2].partition("\n\n")[0]
    documented = {
        f"{group}{name}"
        for group, names in re.findall(r"^\| `([\w.\[\]]*?)(\w+(?:`, `\w+)*)` \|", listed, re.MULTILINE)
        for name in names.split("`, `")
    }
    assert fields(found) == documented and found["machine"]["host"]["cores"] == 8
    rows = {(row["system"], row["ratio"]): row for row in found["rows"]}
    assert {(row["gpu"], row["optimizer"]) for row in rows.values()} == {("A100", "sgd")}
    assert {of: (row["dtype"], row["gradient_route"], row["error_feedback"]) for of, row in rows.items()} == {
        ("zero-infinity", None): ("fp32", None, None),
        ("smartssd", None): ("fp16", "host", None),
        ("smartssd", 0.01): ("fp16", "host", True),
        ("host", None): ("fp16", None, None),
    }


def test_compression_and_formats_where_they_exist(simulated: Simulated) -> None:
    """SmartSSDs run only fp32 state, and the host only dense gradients."""
    arguments = ("--parameters", "1e8", "--devices", "2", "--state-formats", "fp32", "int8")
    found = simulated(*arguments, "--systems", "smartssd", "host", "--compression", "none", "0.01")
    assert [(row["system"], row["state_format"], row["ratio"]) for row in found["rows"]] == [
        ("smartssd", "fp32", None),
        ("smartssd", "fp32", 0.01),
        ("host", "fp32", None),
        ("host", "int8", None),
    ]
    dense, compressed, *_ = found["rows"]
    assert compressed["bytes_per_parameter"]["shared_down"] < 0.03 * dense["bytes_per_parameter"]["shared_down"]


def test_options_reach_the_simulation(simulated: Simulated) -> None:
    """GPU, dtype, optimizer, duplex SSDs and the gradients' route change the simulation."""
    of = ("--parameters", "1e9", "--devices", "2", "--systems", "smartssd")

    def row(*more: str) -> Any:
        return simulated(*of, *more)["rows"][0]

    # Twice every rate that an update waits for halves its seconds. Sizes are written as people write them.
    host = ("--parameters", "1.5b", "--devices", "1", "--systems", "host")
    slow = simulated(*host, "--read", "1", "--write", "1", "--channel", "8", "--cpu", "1")["rows"][0]
    fast = simulated(*host, "--read", "2", "--write", "2", "--channel", "16", "--cpu", "2", "--kernel", "3")
    assert fast["machine"]["device"]["sparse_kernel"] == 3e9
    assert slow["parameters"] == 1.5e9
    assert fast["rows"][0]["seconds"]["update"] == pytest.approx(slow["seconds"]["update"] / 2)
    usual = row()
    assert row("--gpu", "A100")["seconds"]["backward"] < usual["seconds"]["backward"]
    assert row("--duplex")["seconds"]["update"] < usual["seconds"]["update"]
    for optimizer, nbytes in (("sgd", 8), ("rmsprop", 16)):
        assert row("--optimizer", optimizer)["bytes_per_parameter"]["internal_write"] == pytest.approx(nbytes, rel=0.2)
    fp32 = row("--dtype", "fp32", "--gradient-route", "storage")["bytes_per_parameter"]
    bf16 = usual["bytes_per_parameter"]
    expected = (bf16["internal_read"] * 16 / 12, 2 * bf16["shared_up"])
    assert (fp32["internal_read"], fp32["shared_up"]) == pytest.approx(expected)


@pytest.mark.parametrize("devices", [("1", "2"), ("2",)])
def test_plots(tmp_path: Path, cli: Cli, devices: tuple[str, ...]) -> None:
    """Each series is a line against devices, or against model size if there is one number of devices."""
    plot = tmp_path / "steps.svg"
    arguments = ["--parameters", "1e8", "2e8", "--devices", *devices, "--systems", "su+o", "smartssd"]
    contents = set()
    for _ in range(2):
        cli("simulate", *arguments, "--compression", "0.01", "--plot", plot)
        contents.add(plot.read_bytes())
    assert len(contents) == 1
    drawn = {text.text for text in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")}
    assert {"su+o, top 1 %", "smartssd, top 1 %", "seconds per step"} <= drawn
    assert ("storage devices" in drawn) == ({"100e6 parameters", "200e6 parameters"} <= drawn) == (len(devices) > 1)
    assert ("10^9 parameters" in drawn) == (len(devices) == 1)


def test_a_plot_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """The error says what to install or to name, and nothing is simulated before it."""
    few = ["simulate", "--parameters", "1e8", "--devices", "1"]
    (tmp_path / "folder.svg").mkdir()
    assert "folder.svg cannot be written: Is a directory" in cli(*few, "--plot", tmp_path / "folder.svg", status=1).err
    monkeypatch.setattr(Case, "simulate", lambda *_: pytest.fail("it simulates"))
    install = "pip install '.[benchmarks]'"
    for missing, path, told in (
        ("unknown", "steps.txt", "steps.txt is of no known form"),
        ("unknown", "none/steps.svg", "steps.svg cannot be written: there is no such folder"),
        ("matplotlib.backends.backend_agg", "steps.png", install),
        ("matplotlib", "steps.svg", install),
    ):
        monkeypatch.setitem(sys.modules, missing, None)
        assert told in cli(*few, "--plot", tmp_path / path, status=1).err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.svg"]


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


RATES = ("--read", "--write", "--kernel", "--channel")


def test_help_says_what_every_option_does(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """Every option has a description and, except for switches, its true default in it."""
    monkeypatch.setenv("COLUMNS", "2000")
    words = dict(re.findall(r"^  (--[\w-]+).*?\s{2,}(\S.*)$", cli("simulate", "--help").out, re.MULTILINE))
    assert {f"--{name.replace('_', '-')}" for name in vars(parsed())} == set(words)
    assert all(len(of.split()) > 2 for of in words.values())
    defaults = {option: re.search(r"\(default: ([^)]+)\)$", of) for option, of in words.items()}
    switches = {"--duplex", "--error-feedback", "--json", "--plot"}
    assert {option for option, default in defaults.items() if default is None} == switches
    for option, default in defaults.items():
        if default is not None and option not in RATES:
            assert parsed(option, *default[1].split()) == parsed()
    machine = fit(duplex=False).machine(1)
    rates = (machine.device.read, machine.device.write, machine.device.kernel, machine.channel.together)
    for option, rate in zip(RATES, rates, strict=True):
        assert re.search(rf"default: {rate / 1e9:.3g}\b", words[option]), option


TRAINED: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {}),
}


@pytest.mark.parametrize("state", STATE_FORMATS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("optimizer", TRAINED)
def test_what_training_refuses_is_not_simulated(state: str, dtype: str, optimizer: str) -> None:
    """The simulator refuses the state formats that training refuses for a dtype, an optimizer or SmartSSDs."""
    from lightning_smartinfinity.zero3.setup.validation import check_optimizer, check_state_format

    kind, settings = TRAINED[optimizer]
    trained = []
    with suppress(SmartInfinityError):
        check_optimizer(kind([torch.zeros(1)], **settings), state_format=state)
        check_state_format(state, {dtype: {"enabled": True}})
        trained.append("host")
        StrategySettings(update_device="smartssd", state_format=state)
        trained.append("smartssd")
    for system in ("host", "smartssd"):
        options = ["--systems", system, "--state-formats", state, "--dtype", dtype, "--optimizer", optimizer]
        assert [case.is_possible for case in _cases(parsed(*options, "--devices", "1"))] == [system in trained]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--systems", "zero-infinity", "--compression", "0.01"],
        ["--systems", "host", "--state-formats", "int8", "--optimizer", "sgd"],
        ["--systems", "host", "--state-formats", "int8_remainder", "--dtype", "fp16"],
        ["--systems", "su+o", "zero-infinity", "--overlap", "forward"],
        ["--systems", "smartssd", "--state-formats", "bf16"],
    ],
)
def test_nothing_to_simulate(tmp_path: Path, cli: Cli, arguments: list[str]) -> None:
    """Instead of an empty table or plot an error says what was asked and what exists."""
    plot = tmp_path / "steps.svg"
    words = (" ".join(arguments[:2]), " ".join(arguments[-2:]), "int8_remainder with bf16")
    for more in ([], ["--json"], ["--plot", str(plot)]):
        said = cli("simulate", *arguments, *more, status=1)
        assert said.out == "" and [each for each in words if each not in said.err] == []
    assert not plot.exists()


def test_listed_values_that_are_left_out_are_told(cli: Cli) -> None:
    """One message on standard error names the omitted value, and the rest is simulated."""
    few = ["--parameters", "1e6", "--devices", "1", "2", "--systems", "zero-infinity", "smartssd"]
    found = [*few, "--compression", "none", "0.01", "--state-formats", "fp32", "int8"]
    told = "smart-infinity: --state-formats int8 is left out: nothing else that is listed has it.\n"
    assert cli("simulate", *found).err == told


@pytest.mark.parametrize(
    "arguments",
    [
        ["--parameters", "0"],
        ["--parameters", "1.5"],
        ["--parameters", "nan"],
        ["--devices", "0"],
        ["--devices", "257"],
        ["--devices", "many"],
        ["--compression", "0"],
        ["--compression", "1.01"],
        ["--read", "0"],
        ["--read", "inf"],
        ["--write", "1e308"],
        ["--cpu", "1e-320"],
        ["--cores", "0"],
        ["--cores", "1.5"],
        ["--systems", "stock"],
        ["--state-formats", "int2"],
    ],
)
def test_what_simulate_refuses(arguments: list[str], cli: Cli) -> None:
    assert arguments[0] in cli("simulate", *arguments, status=2).err


# ---- smart-infinity plan


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
            ["MODEL", *SMALL, "--tokens", "1e12", "--tbw", "1", "--dram-cache-bytes", "none"],
            [
                "It fits.",
                "Life of the drive (1 TB",
                "more than the 1 TB that the drive may write",
                "(not measured)",
                "You need no storage: AdamW in memory fits",
                "Hours of the training",
                "SmartInfinityStrategy(",
                "class_path",
                "transfer={'dram_cache_bytes': 0}",
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
        pytest.param(
            ["20M", *MACHINE],
            ["state in memory 0.2", "    state_format='fp32',\n)", '      state_format: "fp32"\n  acc'],
            id="state is in memory by default, of which the training chooses the size",
        ),
        pytest.param(
            ["20M", *SMALL, "--host-memory", "1.3GB", "--batch", "48"],
            ["state in memory 0.0", "transfer={'dram_cache_bytes': ", '"dram_cache_bytes": '],
            id="activations that need more than the training would leave free",
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
    words = ["It does not fit as asked:\n  disk (in all) needs", "No combination fits", "state_format='int8'"]
    assert [each for each in [*words, "It lacks the least with "] if each not in printed] == []
    found = planned(folder, *SMALL, "--seq", "16", "--disk", "1MB", status=3)
    broken = [(each["place"], each["owner"]) for each in found["asked"]["broken"]]
    assert broken == [("disk", "optimizer state")] and not found["best"]["fits"]


def test_json_has_bytes_by_owner(folder: str, planned: Any) -> None:
    """Every need is the sum of its owners; a machine's sizes are those that were given. Drives make the ring larger."""
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
    more = planned(folder, *MACHINE, "--seq", "16", "--drives", "3")
    one, three = (
        next(each["owners"]["ring"] for each in of["asked"]["needs"] if "ring" in each["owners"])
        for of in (found, more)
    )
    assert three * (16 + 7) == one * (3 * 16 + 7)  # eight threads update


def test_several_models_make_a_table(cli: Cli) -> None:
    """Each model has a row of as many cells as the heading, and is named when its plan begins."""
    printed = cli("plan", "20M", "40M", *MACHINE, "--seq", "16")
    told = [line for line in printed.err.splitlines() if line.startswith("Planning")]
    assert told == ["Planning 20M ...", "Planning 40M ..."]
    cells = [line.split("|") for line in printed.out.splitlines()]
    assert [row[1].strip() for row in cells[2:]] == ["20M", "40M"] and len({*map(len, cells)}) == 1


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
    streamed = ["--build", "configure_model", "--dram-cache-bytes", "0"]
    needs = planned("300M", *MACHINE, *streamed)["asked"]["needs"]
    most = max(each["bytes"] for each in needs if each["place"] == "host")
    narrow = [*MACHINE, *streamed, "--host-memory", f"{most * 100 // 95 // 10**6}MB"]
    found = planned("300M", *narrow)
    assert found["asked"]["fits"] and {each["place"] for each in found["asked"]["tight"]} == {"host"}
    assert not found["best"]["tight"]
    told = "It fits, but takes 95 % of host memory.\nA tenth of the memory stays free with gradient_bytes="
    assert told in cli("plan", "300M", *narrow).out
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
def test_bad_options_name_a_remedy(wrong: list[str], cli: Cli) -> None:
    """Argparse's error holds the text and the rule's remedy."""
    printed = cli("plan", "7B", *wrong, status=2).err
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
    assert training["payloads"] > 0 and "payloads" not in owners["host", "building"]
    assert payload is None or training["payloads"] == pytest.approx(payload * 20e6, rel=0.1)
    more = found["written_bytes"] - plain["written_bytes"]
    residuals = [training.get("residual", 0), of_disk.get("residuals", 0), more]
    assert residuals == pytest.approx([residual * 20e6, 2 * residual * 20e6, residual * 20e6], rel=0.1)


def test_budgets(planned: Any) -> None:
    """What a process holds follows from them, and the rest of the gradients is on the disk."""
    found = planned("1B", *MACHINE, *BUDGETS)["asked"]
    owners = {(need["place"], need["phase"]): need["owners"] for need in found["needs"]}
    held = owners["host", "training"]
    expected = {"gradient_arena": 1e9, "parameter buffers": 2e9, "state in memory": 3e9}
    assert {name: held[name] for name in expected} == pytest.approx(expected, rel=0.05)
    assert owners["disk", "in all"]["gradients"] == pytest.approx(2 * 1e9, rel=0.1)
    # The state of 12 GB: 9 of them in three places, and 3 in two.
    assert owners["disk", "in all"]["optimizer state"] == pytest.approx(3 * 9e9 + 2 * 3e9, rel=0.1)
    assert "state being saved" not in owners["disk", "in all"]


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
    assert isinstance(strategy, SmartInfinityStrategy) and trainer.global_step == 2
    assert strategy.config["zero_optimization"]["offload_param"]["device"] == "nvme"
    assert strategy.state_bytes > 0 and strategy.host_bytes["residual"] > 0
    assert not strategy._settings.transfer.asynchronous
    strategy.close()
