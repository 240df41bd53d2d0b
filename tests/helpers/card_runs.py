"""Builds transfer handlers over emulated or fake cards, and the same ones over the host for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hls.description import EMULATED, SMARTSSD
from lightning_smartinfinity import SmartSSDConfig
from lightning_smartinfinity.devices import HostDevice, StorageDevice
from lightning_smartinfinity.devices.smartssd import CardRing, CardSetup, SmartSSDDevice, kernel_of
from lightning_smartinfinity.devices.smartssd.discovery.cards import emulated_card
from lightning_smartinfinity.devices.smartssd.discovery.xclbin import Xclbin
from lightning_smartinfinity.native import Pipeline
from tests.pipeline.harness import Case, Run, assert_equal, running

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adam": {
        "optimizer": torch.optim.Adam,
        "options": ({"lr": 1e-2, "weight_decay": 0.1}, {"lr": 3e-3, "betas": (0.4, 0.99), "maximize": True}),
    },
    "adagrad": {
        "optimizer": torch.optim.Adagrad,
        "options": ({"lr": 1e-2, "lr_decay": 0.1}, {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-8}),
        "defaults": {"initial_accumulator_value": 0.5},
    },
    "sgd": {
        "optimizer": torch.optim.SGD,
        "options": (
            {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1},
            {"lr": 3e-3, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
        ),
    },
    "rmsprop": {
        "optimizer": torch.optim.RMSprop,
        "options": (
            {"lr": 1e-2, "momentum": 0.9, "centered": True, "weight_decay": 0.1},
            {"lr": 3e-3, "alpha": 0.3, "maximize": True},
        ),
    },
}
"""Every update rule, with settings that use all of its arithmetic, as changes to a harness's ``Case``."""


def setup_of(
    num_cards: int, path: Path, *, first: int = 0, sharers: int = 1, binding: str = "native", **settings: Any
) -> CardSetup:
    """Return a setup of emulated cards.

    Args:
        num_cards: Number of cards.
        path: Path of the xclbin.
        first: Number of the first card.
        sharers: See :class:`CardSetup`.
        binding: See :class:`CardSetup`.
        **settings: Settings of :class:`SmartSSDConfig`.
    """
    kernels = tuple(kernel.name for kernel in EMULATED.kernels)
    return CardSetup(
        xclbin=Xclbin(path, "", SMARTSSD.platform.vbnv, SMARTSSD.platform.bank.size_bytes, kernels),
        cards=tuple(emulated_card(number) for number in range(first, first + num_cards)),
        settings=SmartSSDConfig(xclbin=path, **settings),
        binding=binding,
        library="libxrt_coreutil.so.2",
        sharers=sharers,
    )


def cards(path: Path, **settings: Any) -> Callable[[Run], StorageDevice]:
    """Return a function that makes the device of a run, with as many cards as the run has folders.

    Args:
        path: Path of the xclbin.
        **settings: See :func:`setup_of`.
    """

    def device(run: Run) -> StorageDevice:
        case, numel = run.case, run.layout.extents.tasklet_numel
        ring = CardRing(
            num_buffers=case.num_buffers,
            gradient_buffer_bytes=numel * case.gradient_dtype.itemsize,
            parameter_bytes=numel * case.dtype.itemsize,
        )
        setup = setup_of(case.num_devices, path, **settings)
        return SmartSSDDevice(setup, kernel=kernel_of(case.rule.name), ring=ring)

    return device


def pipelines(run: Run) -> list[Pipeline]:
    """Return the pipelines of a run's cards."""
    assert isinstance(run.device, SmartSSDDevice)
    return [worker.pipeline for worker in run.device._workers]


class _SettledHost(HostDevice):
    """A host that leaves every tasklet in its folder, as cards do."""

    @property
    def moves_tasklets(self) -> bool:
        return False


def settled_host(run: Run) -> StorageDevice:
    """Return the host's device of a run whose state files are comparable to those of cards."""
    return _SettledHost(num_buffers=run.case.num_buffers)


def state_files(run: Run) -> list[bytes]:
    """Return every byte of state on storage, by file."""
    return [Path(file.path).read_bytes() for file in run.store.files]


def same_as_host(run: Run, host: Run) -> None:
    """Assert that parameters, state, step counts and every byte on storage are equal."""
    assert_equal(run.state(), host.state())
    for mine, theirs in zip(state_files(run), state_files(host), strict=True):
        assert mine == theirs


@contextmanager
def beside_host(folder: Path, case: Case, path: Path, **settings: Any) -> Iterator[tuple[Run, Run]]:
    """Yield a run on cards and one on the host, which must be equal at the end.

    Args:
        folder: Folder of both.
        case: Their settings.
        path: Path of the xclbin.
        **settings: See :func:`setup_of`.
    """
    with (
        running(folder / "card", case, device=cards(path, **settings)) as run,
        running(folder / "host", case, device=settled_host) as host,
    ):
        yield run, host
        same_as_host(run, host)
