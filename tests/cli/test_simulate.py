"""The command ``smart-infinity simulate``, its options, and combinations that are unavailable."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.cli.simulation.command import _cases
from lightning_smartinfinity.cli.simulation.options import add_options
from lightning_smartinfinity.cli.simulation.steps import Case
from lightning_smartinfinity.errors import SmartInfinityError
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.planning.paper.fit import fit
from lightning_smartinfinity.planning.simulator.gradients import Dense
from lightning_smartinfinity.planning.simulator.step import System, simulate_step
from lightning_smartinfinity.planning.simulator.workload import Workload
from lightning_smartinfinity.settings import HOST_TASKLET_BYTES
from lightning_smartinfinity.settings.strategy import StrategySettings
from tests.cli.conftest import Cli

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
    workload = Workload(numel=2 * 10**9, gradients=Dense(2))
    step = simulate_step(fit(duplex=False).machine(4), workload, System.CARDS)
    (row,) = [row for row in rows if row[:3] == ("2e9", "4", "smartssd") and row[5] == "none"]
    assert row[-4:] == tuple(f"{part:.2f}" for part in (step.forward, step.backward, step.update, step.step))


def test_memory_of_this_package(simulated: Simulated, cli: Cli) -> None:
    """Memory is listed by purpose, once for all overlaps, in GiB, and in JSON in bytes."""
    of = ["--parameters", "1073741824", "--devices", "2", "--systems", "su+o", "smartssd", "host"]
    of += ["--compression", "none", "0.01", "--overlap", "none", "forward"]
    title, head, *lines = cli("simulate", *of).out.partition("\n\n")[2].splitlines()
    assert "GiB" in title
    assert head.split()[-4:] == ["arena", "ring", "payloads", "residual"]
    assert [line.split()[2] for line in lines] == ["smartssd", "smartssd", "host"]
    assert [line.split()[-4] for line in lines] == ["2.00"] * 3
    assert [line.split()[-1] for line in lines] == ["0.00", "4.00", "0.00"]
    rows = simulated(*of, "--no-error-feedback")["rows"]
    held = {(row["system"], row["ratio"]): row["host_bytes"] for row in rows}
    assert held["su+o", None] == {}
    assert set(held["smartssd", 0.01]) == {"gradient_arena", "ring", "payloads"}
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
    assert fields(found) == documented
    rows = {(row["system"], row["ratio"]): row for row in found["rows"]}
    assert found["machine"]["host"]["cores"] == 8
    assert {row["gpu"] for row in rows.values()} == {"A100"}
    assert {row["optimizer"] for row in rows.values()} == {"sgd"}
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
    assert row("--optimizer", "sgd")["bytes_per_parameter"]["internal_write"] == pytest.approx(8, rel=0.2)
    assert row("--optimizer", "rmsprop")["bytes_per_parameter"]["internal_write"] == pytest.approx(16, rel=0.2)
    fp32 = row("--dtype", "fp32", "--gradient-route", "storage")["bytes_per_parameter"]
    assert fp32["internal_read"] / usual["bytes_per_parameter"]["internal_read"] == pytest.approx(16 / 12)
    assert fp32["shared_up"] == 2 * usual["bytes_per_parameter"]["shared_up"]


@pytest.mark.parametrize("devices", [("1", "2"), ("2",)])
def test_plots(tmp_path: Path, cli: Cli, devices: tuple[str, ...]) -> None:
    """Each series is a line against devices, or against model size if there is one number of devices."""
    plot = tmp_path / "steps.svg"
    arguments = ["--parameters", "1e8", "2e8", "--devices", *devices, "--systems", "su+o", "smartssd"]
    cli("simulate", *arguments, "--compression", "0.01", "--plot", plot)
    drawn = {text.text for text in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")}
    assert {"su+o, top 1 %", "smartssd, top 1 %", "seconds per step"} <= drawn
    assert ("storage devices" in drawn) == ({"100e6 parameters", "200e6 parameters"} <= drawn) == (len(devices) > 1)
    assert ("10^9 parameters" in drawn) == (len(devices) == 1)
    first = plot.read_bytes()
    assert main(["simulate", *arguments, "--compression", "0.01", "--plot", str(plot)]) == 0
    assert plot.read_bytes() == first


def test_a_plot_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """The error says what to install or to name, and nothing is simulated before it."""
    few = ["simulate", "--parameters", "1e8", "--devices", "1"]
    (tmp_path / "folder.svg").mkdir()
    assert "folder.svg cannot be written: Is a directory" in cli(*few, "--plot", tmp_path / "folder.svg", status=1).err
    monkeypatch.setattr(Case, "simulate", lambda *_: pytest.fail("it simulates"))
    assert "steps.txt is of no known form" in cli(*few, "--plot", tmp_path / "steps.txt", status=1).err
    assert (
        "steps.svg cannot be written: there is no such folder"
        in cli(*few, "--plot", tmp_path / "none" / "steps.svg", status=1).err
    )
    for missing, form in (("matplotlib.backends.backend_agg", "png"), ("matplotlib", "svg")):
        monkeypatch.setitem(sys.modules, missing, None)
        assert "pip install '.[benchmarks]'" in cli(*few, "--plot", str(tmp_path / f"steps.{form}"), status=1).err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.svg"]


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


RATES = ("--read", "--write", "--kernel", "--channel")
SWITCHES = {"--duplex", "--error-feedback", "--json", "--plot"}


def test_help_says_what_every_option_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option has a description and, except for switches, its true default in it."""
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    words = dict(re.findall(r"^  (--[\w-]+).*?\s{2,}(\S.*)$", capsys.readouterr().out, re.MULTILINE))
    assert {f"--{name.replace('_', '-')}" for name in vars(parsed())} == set(words)
    assert all(len(of.split()) > 2 for of in words.values())
    defaults = {option: re.search(r"\(default: ([^)]+)\)$", of) for option, of in words.items()}
    assert {option for option, default in defaults.items() if default is None} == SWITCHES
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
    refused = []
    try:
        check_optimizer(kind([torch.zeros(1)], **settings), state_format=state)
        check_state_format(state, {dtype: {"enabled": True}})
    except SmartInfinityError as error:
        refused.append(error)
    on_cards = list(refused)
    try:
        StrategySettings(update_device="smartssd", state_format=state)
    except SmartInfinityError as error:
        on_cards.append(error)
    for system, errors in (("host", refused), ("smartssd", on_cards)):
        options = ["--systems", system, "--state-formats", state, "--dtype", dtype, "--optimizer", optimizer]
        assert [case.is_possible for case in _cases(parsed(*options, "--devices", "1"))] == [not errors]


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
    for more in ([], ["--json"], ["--plot", str(plot)]):
        said = cli("simulate", *arguments, *more, status=1)
        assert said.out == ""
        assert " ".join(arguments[:2]) in said.err and f"{arguments[-2]} {arguments[-1]}" in said.err
        assert "int8_remainder with bf16" in said.err
    assert not plot.exists()


def test_listed_values_that_are_left_out_are_told(cli: Cli) -> None:
    """One message on standard error names the omitted value, and the rest is simulated."""
    few = ["--parameters", "1e6", "--devices", "1", "2", "--systems", "zero-infinity", "smartssd"]
    found = [*few, "--compression", "none", "0.01", "--state-formats", "fp32", "int8"]
    assert cli("simulate", *found).err.splitlines() == [
        "smart-infinity: --state-formats int8 is left out: nothing else that is listed has it."
    ]


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
def test_what_argparse_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err
