"""What the simulator predicts: where compression gains, the figures of the pages, and values that it refuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity import BlockScaled, ConfigError, TopK
from lightning_smartinfinity import planning as plan
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.planning import (
    BlockScaledPayload,
    Channel,
    Dense,
    Device,
    Gpu,
    Host,
    Machine,
    Overlap,
    Pairs,
    Route,
    System,
    TopKPayload,
    Workload,
    host_bytes,
    simulate_step,
)
from lightning_smartinfinity.planning.cost import (
    CompressionGain,
    CompressionResources,
    gain_of,
    gain_on_cards,
    gain_on_host,
    published_smartssds,
)
from lightning_smartinfinity.planning.paper.fit import FITTED_DEVICES, fit
from lightning_smartinfinity.planning.paper.paper import SCALING
from lightning_smartinfinity.planning.paper.reproduction import (
    headroom,
    mean_error,
    predictions,
    relative_to_one_device,
)

TOP_K = TopKPayload(0.01, 2)
UNKEPT = partial(TopK, error_feedback=False)


def dense(item_bytes: int = 2) -> Workload:
    return Workload(numel=1, gradients=Dense(item_bytes), parameter_bytes=item_bytes)


def gain(codec: Any, item_bytes: int = 4, **resources: Any) -> CompressionGain:
    """Return the gain of a codec on cards beside 64 cores."""
    return gain_of(codec, dense(item_bytes), CompressionResources(**{"num_cores": 64} | resources))


@pytest.mark.parametrize(
    ("found", "gains", "reason"),
    [
        # Many cards on one channel gain, and gradients that pass through the SSDs.
        (lambda: gain(UNKEPT(0.01), num_cards=0), False, ""),
        (lambda: gain(UNKEPT(0.01), num_cards=4), False, "not the channel"),
        (lambda: gain(UNKEPT(0.01), num_cards=20), True, "times as fast"),
        (lambda: gain(UNKEPT(0.01), num_cards=4, route=Route.STORAGE), True, ""),
        (lambda: gain_on_cards(published_smartssds(4), dense(), TOP_K, route=Route.STORAGE), True, ""),
        # The host's gradients stay in host memory.
        (gain_on_host, False, "host memory"),
        # A payload of all values with their positions is larger than the values.
        (lambda: gain(TopK(1.0), 2, num_cards=4, route=Route.STORAGE), False, "Sending 200.0%"),
        (lambda: gain(TopK(1.0), 2, num_cards=4, route=Route.STORAGE), False, "no fewer bytes"),
        # Compression makes a step longer where devices are the bottleneck.
        (
            lambda: gain(TopK(0.01), 2, num_cards=4),
            False,
            "not the channel. Selecting the elements to send and keeping the others takes additional time.",
        ),
        # A slow selection on the CPU takes longer than sending everything; 8 bits always come from the CPU.
        (
            lambda: gain_on_cards(published_smartssds(40, select=3e-9), dense(4), TOP_K),
            False,
            "takes longer than it saves",
        ),
        (lambda: gain(BlockScaled(), num_cards=40, num_cores=4), False, "takes longer than it saves"),
        (lambda: gain(BlockScaled(), num_cards=40, num_threads=64), True, ""),
        (lambda: gain(BlockScaled(error_feedback=False), num_cards=4), False, "Sending 25.1% of the gradients' bytes"),
        (
            lambda: gain(BlockScaled(error_feedback=False), 2, num_cards=40),
            True,
            "Sending 50.2%",
        ),
    ],
)
def test_where_compression_gains(found: Any, gains: bool, reason: str) -> None:
    """The prediction says whether there is a gain, and why."""
    assert found().gains == gains and reason in found().reason


@pytest.mark.parametrize(
    ("found", "ratio"),
    [
        # Half of the bytes on the channel are gradients.
        (lambda: gain_on_cards(published_smartssds(40), dense(4), TOP_K), 8 / (4 + 0.04)),
        (lambda: gain(BlockScaled(error_feedback=False), 4, num_cards=40), 8 / (4 + 1.004)),
        (lambda: gain(BlockScaled(error_feedback=False), 2, num_cards=40), 4 / (2 + 1.004)),
    ],
)
def test_how_much_is_gained(found: Any, ratio: float) -> None:
    """Where cards wait for their channel, the gain is that of the bytes saved on it."""
    assert found().ratio == pytest.approx(ratio, rel=0.1)


@pytest.mark.parametrize(
    ("slower", "faster", "times"),
    [
        # GPUs select faster than few cores.
        ((TopK(0.01), {"num_cores": 1}), (TopK(0.01), {"num_cores": 1, "num_gpus": 4}), 1.1),
        # Gradients and residuals travel to the GPU, and the link of one GPU is slower than many cards.
        ((TopK(0.01), {"num_gpus": 1}), (UNKEPT(0.01), {"num_gpus": 1}), 1),
        ((UNKEPT(0.01), {"num_gpus": 1}), (UNKEPT(0.01), {"num_gpus": 8}), 1),
        # Few threads take long for the residual.
        ((TopK(0.01), {"num_threads": 1}), (TopK(0.01), {"num_threads": 8}), 1),
        ((TopK(0.01), {"num_threads": 8}), (TopK(0.01), {"num_threads": 64}), 1),
        ((TopK(0.01), {"num_threads": 64}), (UNKEPT(0.01), {}), 1),
        # With few cores a step waits for the selection, so that selecting more takes longer.
        ((UNKEPT(0.021), {"num_cards": 40, "num_cores": 2}), (UNKEPT(0.02), {"num_cards": 40, "num_cores": 2}), 2),
        # A smaller type of values leaves more of the channel.
        (
            (TopK(0.2), {"num_cards": 40, "num_threads": 64}),
            (TopK(0.2, value_dtype="bf16"), {"num_cards": 40, "num_threads": 64}),
            1,
        ),
    ],
)
def test_what_is_faster(slower: tuple[Any, dict[str, Any]], faster: tuple[Any, dict[str, Any]], times: float) -> None:
    """One prediction is higher than another by more than a factor."""
    few, many = (gain(codec, **{"num_cards": 20} | resources).ratio for codec, resources in (slower, faster))
    assert many > times * few


def test_what_makes_no_difference() -> None:
    """A card selects with two threads; on a GPU is no gain for 8 bits or a sample; 8 bits need no sparse kernel."""
    cores = [gain_on_cards(published_smartssds(1, select=20e-9, cores=n), dense(4), TOP_K).ratio for n in (1, 2, 64)]
    assert cores[1] > 1.5 * cores[0] and cores[2] == pytest.approx(cores[1])
    for codec in (BlockScaled(), TopK(0.01, exact=False)):
        on_cpu, on_gpu = (gain(codec, num_cards=20, num_cores=1, num_gpus=gpus) for gpus in (0, 4))
        assert on_cpu == on_gpu
    machine = published_smartssds(1)
    slow = replace(machine, device=replace(machine.device, sparse_kernel=5e8))
    for form, factor in ((BlockScaledPayload(), 1), (TOP_K, 2)):
        usual, slower = (gain_on_cards(each, dense(4), form).ratio for each in (machine, slow))
        assert usual == slower if factor == 1 else usual > factor * slower


# ---- the simulator refuses values that make no sense


NAN, INF = float("nan"), float("inf")
RATES = (0, -1, NAN, INF, True, "fast", 1e-320, 1e308, None)
SECONDS = (-1, NAN, INF, True, "slow", 1e-320, 1e308, None)
COUNTS = (0, -1, 1.5, True, "1", NAN, None, 10**5000)
ITEMS = (0, -2, 1, 3, 2.5, True, NAN, "2", None)

DEVICE, CHANNEL = Device(read=1e9, write=1e9, kernel=1e9), Channel(down=1e9, up=1e9)
GPU, HOST = Gpu(forward=1e-10, backward=1e-10), Host()
WORKLOAD = Workload(numel=1, gradients=Dense(2))


def device(**fields: Any) -> Device:
    return Device(**{"read": 1e9, "write": 1e9} | fields)


def machine(**fields: Any) -> Machine:
    return Machine(**{"device": DEVICE, "num_devices": 2, "channel": CHANNEL, "gpu": GPU, "host": HOST} | fields)


def workload_of(**fields: Any) -> Workload:
    return Workload(**{"numel": 1, "gradients": Dense(2)} | fields)


def memory(**fields: Any) -> Any:
    return host_bytes(**{"workload": WORKLOAD, "arena_item_bytes": 2} | fields)


def step(**fields: Any) -> Any:
    return simulate_step(**{"machine": machine(), "workload": WORKLOAD, "system": System.CARDS} | fields)


BAD: list[tuple[Callable[..., Any], str, str, tuple[Any, ...]]] = [
    *((device, "Device", name, RATES) for name in ("read", "write")),
    *((device, "Device", name, RATES[:-1]) for name in ("kernel", "sparse_kernel")),
    (device, "Device", "duplex", (1, None, "yes")),
    (device, "Device", "depth", COUNTS),
    *((Channel, "Channel", name, RATES) for name in ("down", "up")),
    (Channel, "Channel", "together", RATES[:-1]),
    *((Gpu, "Gpu", name, SECONDS) for name in ("forward", "backward", "top_k")),
    *((Host, "Host", name, SECONDS) for name in ("update", "receive", "select", "feed_back")),
    (Host, "Host", "cores", COUNTS),
    (machine, "Machine", "num_devices", COUNTS),
    *((machine, "Machine", name, (None, 1e9, WORKLOAD)) for name in ("device", "channel", "gpu", "host")),
    (Dense, "Dense", "item_bytes", ITEMS),
    (lambda **of: TopKPayload(**{"ratio": 0.01, "value_bytes": 2} | of), "TopKPayload", "value_bytes", ITEMS),
    (lambda **of: TopKPayload(**{"value_bytes": 2} | of), "TopKPayload", "ratio", (0, -1, 1.01, NAN, True, "1", None)),
    (Pairs, "Pairs", "volume", (0, -1, 2.01, NAN, INF, True, "1", None)),
    (workload_of, "Workload", "numel", COUNTS),
    (workload_of, "Workload", "gradients", (None, 2, "dense")),
    (workload_of, "Workload", "num_arrays", (*COUNTS, 9)),
    (workload_of, "Workload", "parameter_bytes", ITEMS),
    (workload_of, "Workload", "state_format", ("int2", None, [])),
    (workload_of, "Workload", "tasklet_bytes", COUNTS[:6]),
    (workload_of, "Workload", "num_buffers", (*COUNTS, 1, 4097)),
    (memory, "host_bytes", "workload", (None, machine())),
    (memory, "host_bytes", "arena_item_bytes", ITEMS),
    (memory, "host_bytes", "num_cards", COUNTS[1:]),
    (memory, "host_bytes", "route", (None, "host")),
    (memory, "host_bytes", "error_feedback", (None, 1)),
    (step, "simulate_step", "machine", (None, WORKLOAD)),
    (step, "simulate_step", "workload", (None, machine())),
    (step, "simulate_step", "system", (None, "smartssd")),
    (step, "simulate_step", "overlap", (None, "none", System.CARDS)),
    (step, "simulate_step", "route", (None, "host")),
    (fit(duplex=False).machine, "PaperMachine.machine", "gpu", ("H100", None, [])),
    *(
        (partial(CompressionResources, num_cards=1, num_cores=1), "CompressionResources", name, (value,))
        for name, value in {"num_cores": 0, "num_cards": -1, "num_threads": 0, "num_gpus": 1.5}.items()
    ),
]


@pytest.mark.parametrize(("make", "owner", "name", "values"), BAD, ids=[f"{owner}-{name}" for _, owner, name, _ in BAD])
def test_out_of_range(make: Callable[..., Any], owner: str, name: str, values: tuple[Any, ...]) -> None:
    """Our own error names the class, the field and the value, and says what to pass."""
    others = {"down": 1e9, "up": 1e9} if make is Channel else {"forward": 0, "backward": 0} if make is Gpu else {}
    others |= {"num_devices": 1} if owner == "PaperMachine.machine" else {}
    for value in values:
        with pytest.raises(ConfigError, match=re.escape(f"{owner}({name}=")) as raised:
            make(**others | {name: value})
        assert raised.value.remedy.startswith(("Pass ", "Use one of: "))


def test_numbers_of_other_types() -> None:
    """NumPy numbers are accepted, and a whole number can be a rate."""
    assert device(read=np.float32(1e9), write=10**9, depth=np.int64(2)).write == 10**9
    assert TopKPayload(1, 2).nbytes(10) == TopKPayload(1.0, 2).nbytes(10)


def test_half_a_master_is_a_parameter_in_16_bit() -> None:
    """int8_remainder exists only for 16-bit parameters, as in training."""
    assert workload_of(state_format="int8_remainder")
    with pytest.raises(ConfigError, match=r"parameter_bytes=4\) does not exist.*state_format=.*'int8'"):
        workload_of(state_format="int8_remainder", parameter_bytes=4)


@pytest.mark.parametrize("seconds", [1e-18, 1e6])
@pytest.mark.parametrize("rate", [1.0, 1e18])
def test_the_ends_of_the_ranges_are_simulated(rate: float, seconds: float) -> None:
    """Extreme rates and seconds simulate to finite times that lose nothing."""
    figures = Machine(
        device=Device(read=rate, write=rate, kernel=rate),
        num_devices=3,
        channel=Channel(down=rate, up=rate),
        gpu=Gpu(forward=seconds, backward=seconds),
        host=Host(receive=seconds),
    )
    for system in (System.CARDS, System.PUBLISHED, System.HOST):
        took = simulate_step(figures, workload_of(numel=10**7, parameter_bytes=4), system)
        assert 1e7 * max(2 * seconds, 24 / rate / 3) <= took.step < INF
    assert simulate_step(figures, WORKLOAD, System.CARDS, overlap=Overlap.FORWARD).step > 0


# ---- the pages on simulation show the simulator's results


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "simulation.md").read_text()


@pytest.mark.long  # the tests below have the figures of the paper
def test_tables_are_as_simulated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/reproduction.md has every title and table that the benchmark prints."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["paper_tables.py"])
    import paper_tables

    monkeypatch.setattr(paper_tables, "describe", lambda *packages: "")
    paper_tables.main()
    titles_and_tables = capsys.readouterr().out.strip().split("\n\n")
    page = (ROOT / "docs" / "reproduction.md").read_text()
    printed = list(zip(titles_and_tables[::2], titles_and_tables[1::2], strict=True))
    assert len(printed) > 12 and [title for title, table in printed if f"\n{title}\n\n{table}\n" not in page] == []


def test_the_example_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints exactly the example's output."""
    arguments, printed = PAGE.partition("```console\n$ smart-infinity ")[2].partition("\n```")[0].split("\n", 1)
    assert (main(arguments.split()), capsys.readouterr().out) == (0, printed + "\n")


def test_the_library_prints_what_its_example_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """The example prints exactly what the page shows, and uses public names."""
    code, printed = PAGE.partition("```python\n")[2].partition("\n```")[0::2]
    exec(compile(code, "docs/simulation.md", "exec"), {})
    assert capsys.readouterr().out == printed.partition("\n```\n")[2].partition("```")[0]
    imported = re.findall(r"^from lightning_smartinfinity.planning import (.*)$", code, re.MULTILINE)
    assert set(imported[0].split(", ")) <= set(plan.__all__)
    assert all(getattr(plan, name) is not None for name in plan.__all__)
    assert len(set(plan.__all__)) == len(plan.__all__) > 20


def test_gains_are_as_predicted() -> None:
    """The table of gains for the top percent equals the cost model."""
    head, _, *rows = (line.strip("| ").split(" | ") for line in PAGE.rpartition("64 cores:\n\n")[2].splitlines())
    assert len(rows) == 12
    for route, bits, error_feedback, *gains in rows:
        gradient, parameter = (int(text) // 8 for text in bits.split(", "))
        dense = Workload(numel=1, gradients=Dense(gradient), parameter_bytes=parameter)
        codec = TopK(0.01, error_feedback=error_feedback == "yes")
        for num_cards, gain in zip(head[3:], gains, strict=True):
            setting = CompressionResources(
                num_cards=int(num_cards), num_cores=64, num_threads=8, route=Route(route.strip("`"))
            )
            assert gain == f"{gain_of(codec, dense, setting).ratio:.2f}"


@pytest.mark.parametrize("duplex", [False, True])
def test_mean_errors(duplex: bool) -> None:
    """Mean errors of the baseline and SU+O are at most 7 % for numbers that no parameter was fitted to."""
    found = predictions(fit(duplex=duplex))
    assert max(mean_error(found, system, fitted=False) for system in ("ZeRO-Infinity", "SU+O")) <= 0.07
    assert {one.num_devices for one in found if one.fitted} == set(FITTED_DEVICES)
    predicted = {(one.table, one.gpu, one.num_devices) for one in found if not one.fitted and one.system == "SU+O"}
    assert {("scaling", gpu, number) for gpu in SCALING for number in (1, 2, 4, 8)} < predicted


def test_scaling_in_the_unit_of_the_paper() -> None:
    """The speeds equal the printed ones, and an error on one device affects all relative speeds."""
    found = predictions(fit(duplex=False))
    relative = relative_to_one_device(found)
    scaled = {(one.gpu, one.system, one.num_devices): one for one in found if one.table == "scaling"}
    for gpu, scaling in SCALING.items():
        printed = {"ZeRO-Infinity": scaling.baseline[1:], "SU+O": scaling.optimized, "SU+O+C": scaling.compressed}
        for system, speeds in printed.items():
            of = [one for one in relative if (one.gpu, one.system) == (gpu, system)]
            assert [one.paper for one in of] == pytest.approx(list(speeds))
    for one in relative:
        same, alone = scaled[one.gpu, one.system, one.num_devices], scaled[one.gpu, "ZeRO-Infinity", 1]
        assert 1 + one.error == pytest.approx((1 + alone.error) / (1 + same.error))


BARS = {  # with SSD time shared, and duplex
    "update": (1.5, 2.4),
    "step": (1.25, 1.5),
    "step, next forward hidden": (1.3, 1.6),
    "step, compressed": (1.3, 1.55),
}


@pytest.mark.parametrize("duplex", [False, True])
def test_headroom_over_the_published_handler(duplex: bool) -> None:
    """With ten devices and 8.4B parameters overlap alone gains at least these factors with the same bytes."""
    found = headroom(fit(duplex=duplex).machine(10))
    for name, bars in BARS.items():
        assert found.ratios[name] >= bars[duplex], name
    for ours, published in (
        (found.ours, found.published),
        (found.hidden, found.published),
        (found.ours_compressed, found.published_compressed),
        (found.hidden_compressed, found.published_compressed),
    ):
        assert astuple(ours.traffic) == pytest.approx(astuple(published.traffic), rel=1e-6)
        # The simulated device has one of the last tasklets.
        assert (ours.backward, ours.forward) == (pytest.approx(published.backward, rel=0.003), published.forward)
