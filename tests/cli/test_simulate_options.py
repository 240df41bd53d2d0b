"""Options of ``smart-infinity simulate``, and combinations that are unavailable."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.cli.simulation.command import _cases
from lightning_smartinfinity.cli.simulation.options import add_options
from lightning_smartinfinity.errors import SmartInfinityError
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.planning.paper.fit import fit
from lightning_smartinfinity.settings.strategy import StrategySettings
from tests.cli.conftest import Cli


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


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
    machine = fit(duplex=False).machine(1)
    rates = {f"--{name}": getattr(machine.device, name) for name in ("read", "write", "kernel")}
    for option, default in defaults.items():
        if default is not None and option not in rates | {"--channel": 0}:
            assert parsed(option, *default[1].split()) == parsed()
    for option, rate in {**rates, "--channel": machine.channel.together}.items():
        shown = re.findall(r"[\d.]+", words[option].rpartition("default")[2])
        assert float(shown[0]) == pytest.approx(rate / 1e9, abs=0.005)
    assert machine.device.sparse_kernel is not None
    assert words["--kernel"].endswith(f"with compression {machine.device.sparse_kernel / 1e9:g})")


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
