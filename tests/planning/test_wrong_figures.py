"""The simulator refuses values that make no sense."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.planning.memory import host_bytes
from lightning_smartinfinity.planning.paper.fit import fit
from lightning_smartinfinity.planning.simulator.gradients import Dense, Pairs, TopKPayload
from lightning_smartinfinity.planning.simulator.hardware import Channel, Device, Gpu, Host, Machine
from lightning_smartinfinity.planning.simulator.step import Overlap, System, simulate_step
from lightning_smartinfinity.planning.simulator.workload import Workload

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


def workload(**fields: Any) -> Workload:
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
    (workload, "Workload", "numel", COUNTS),
    (workload, "Workload", "gradients", (None, 2, "dense")),
    (workload, "Workload", "num_arrays", (*COUNTS, 9)),
    (workload, "Workload", "parameter_bytes", ITEMS),
    (workload, "Workload", "state_format", ("int2", None, [])),
    (workload, "Workload", "tasklet_bytes", COUNTS[:6]),
    (workload, "Workload", "num_buffers", (*COUNTS, 1, 4097)),
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
    assert workload(state_format="int8_remainder")
    with pytest.raises(ConfigError, match=r"parameter_bytes=4\) does not exist.*state_format=.*'int8'"):
        workload(state_format="int8_remainder", parameter_bytes=4)


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
        took = simulate_step(figures, workload(numel=10**7, parameter_bytes=4), system)
        assert 1e7 * max(2 * seconds, 24 / rate / 3) <= took.step < INF
    assert simulate_step(figures, WORKLOAD, System.CARDS, overlap=Overlap.FORWARD).step > 0
