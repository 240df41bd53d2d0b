"""Compressed gradients in a Trainer: what is sent and what is kept do not depend on other settings."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import BlockScaled, CudaError, SmartInfinityStrategy, TopK, TransferConfig
from lightning_smartinfinity.devices import HostDevice
from lightning_smartinfinity.pipeline.gradients import device_selection
from lightning_smartinfinity.pipeline.gradients.compressed_gradients import CompressedGradients
from lightning_smartinfinity.pipeline.gradients.device_selection import DeviceSelection
from lightning_smartinfinity.zero3.optimizer import open_state
from tests.helpers import reference
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit
from tests.training.test_overlap import SMALL_RING, assert_same, result
from tests.training.worker import Run, launch

# The recipe has groups, a schedule, accumulation, clipping, and a parameter that some steps do not use.
BASE = Recipe(groups=True, scheduler="step", skip_side_at=(1,), depth=1, max_steps=4, accumulate=2, clip=0.3)
CODECS = {
    "top 5 %": TopK(0.05),
    "top 5 %, without error feedback": TopK(0.05, error_feedback=False),
    "top 5 % of a sample, in bf16": TopK(0.05, exact=False, value_dtype="bf16"),
    "8 bits": BlockScaled(),
}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
OVERLAPS = ("forward", "backward")

Result = tuple[Any, dict[str, torch.Tensor]]


def run_of(root: Path, precision: str, codec: Any, *, overlap: str = "none", **settings: Any) -> Run:
    """Return a run whose updates take several tasklets."""
    recipe = dataclasses.replace(BASE, precision=precision)
    options = {"overlap": overlap, "compression": codec}
    return Run(out=str(root), recipe=recipe, transfer=SMALL_RING, options=options, **settings)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], tuple[Result, Path]]:
    """Return a function that trains a case once without overlap and gives its result and its checkpoint at step 2."""
    known: dict[tuple[str, str | None], tuple[Result, Path]] = {}

    def trained(precision: str, name: str | None) -> tuple[Result, Path]:
        if (precision, name) not in known:
            root = tmp_path_factory.mktemp("straight")
            run = run_of(root, precision, None if name is None else CODECS[name], save_at=(2,))
            known[precision, name] = result(run), root / "step-2.ckpt"
        return known[precision, name]

    return trained


@pytest.mark.filterwarnings("ignore:.*no gain")
@pytest.mark.parametrize(
    ("precision", "error_feedback"),
    long_but([("bf16-mixed", True)], itertools.product(PRECISIONS, [True, False])),
)
def test_sending_everything_changes_no_bit(precision: str, error_feedback: bool, straight: Any, tmp_path: Path) -> None:
    """With ratio=1 nothing is compressed, and the other settings are ignored."""
    with pytest.warns(UserWarning, match="value_dtype and exact are ignored"):
        codec = TopK(1.0, error_feedback=error_feedback, value_dtype="bf16")
    assert_same(result(run_of(tmp_path, precision, codec)), straight(precision, None)[0])


@pytest.mark.parametrize("name", CODECS)
def test_compression_changes_training(name: str, straight: Any) -> None:
    """Compression changes the losses, so that the comparisons in the other tests mean something."""
    assert straight("32-true", name)[0][0][0] != straight("32-true", None)[0][0][0]


# Each kind of overlap always runs with one codec, and each kind of codec with one overlap.
@pytest.mark.parametrize(
    ("name", "overlap"),
    long_but([("top 5 %", "forward"), ("8 bits", "backward")], itertools.product(CODECS, OVERLAPS)),
)
def test_overlap_changes_no_bit(name: str, overlap: str, straight: Any, tmp_path: Path) -> None:
    """A speculative update that is rolled back leaves the residual unchanged."""
    run = run_of(tmp_path, "32-true", CODECS[name], overlap=overlap, delays=0)
    assert_same(result(run), straight("32-true", name)[0])


@pytest.mark.parametrize(
    ("name", "precision"),
    long_but(
        [("top 5 %", "32-true"), ("8 bits", "bf16-mixed")],
        itertools.product(["top 5 %", "8 bits"], PRECISIONS),
    ),
)
def test_resume_changes_no_bit(name: str, precision: str, straight: Any, tmp_path: Path) -> None:
    """A checkpoint restores the residual."""
    (expected, expected_masters), checkpoint = straight(precision, name)
    run = run_of(tmp_path, precision, CODECS[name], resume=str(checkpoint))
    (losses, _, _), masters = result(run)
    assert losses == expected[0][2 * BASE.accumulate :]
    for parameter, master in expected_masters.items():
        assert torch.equal(masters[parameter], master), parameter


@pytest.mark.parametrize(
    ("name", "precision"),
    long_but(
        [("top 5 %", "32-true"), ("top 5 %, without error feedback", "16-mixed")],
        itertools.product(["top 5 %", "top 5 %, without error feedback"], PRECISIONS),
    ),
)
def test_selecting_on_a_device_changes_no_bit(
    name: str, precision: str, straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's selection, as on GPUs, equals the native core's. Tasklets are selected while others are updated."""
    select_on_cpu(monkeypatch)
    done: list[str] = []

    def noting(owner: Any, method: str) -> None:
        call = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *args: done.append(method) or call(*args))

    noting(DeviceSelection, "_encoded")
    noting(HostDevice, "submit")
    noting(HostDevice, "extend")
    assert_same(result(run_of(tmp_path, precision, CODECS[name])), straight(precision, name)[0])
    assert done.count("extend") > 0
    for step in " ".join(done).split("submit"):
        num_more = step.count("extend")
        assert step.split()[: 2 * num_more] == ["_encoded", "extend"] * num_more


def select_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select with torch on the CPU, as on a GPU."""

    def on_device(*args: Any, **kwargs: Any) -> CompressedGradients:
        return CompressedGradients(*args, **{**kwargs, "device": torch.device("cpu")})

    monkeypatch.setattr(open_state, "CompressedGradients", on_device)


@pytest.mark.parametrize("begun", [0, 1])
def test_no_memory_to_select_on_a_device(begun: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory raises our own error, and no step is committed."""
    select_on_cpu(monkeypatch)
    select, selected = device_selection.top_k_payload, []

    def fail(*args: Any, **settings: Any) -> torch.Tensor:
        if len(selected) == begun:
            raise torch.OutOfMemoryError("too much")
        selected.append(1)
        return select(*args, **settings)

    monkeypatch.setattr(device_selection, "top_k_payload", fail)
    strategy = SmartInfinityStrategy(
        tmp_path / "state", compression=TopK(0.05), overlap="none", transfer=TransferConfig(**SMALL_RING)
    )
    with pytest.raises(CudaError, match=r"no memory on cpu.*too much.*smaller tasklets"):
        fit(LitTiny(Recipe(depth=1, max_steps=1)), tmp_path, strategy, max_steps=1)
    assert strategy._training_optimizer is not None
    assert strategy._training_optimizer.rank_state.handler.generation == 0
    assert len(selected) == begun


def sent(gradients: dict[str, torch.Tensor], ratio: float) -> dict[str, torch.Tensor]:
    """Return the largest gradients of all parameters, with zeros elsewhere."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
    chosen = flat.abs().topk(math.ceil(ratio * len(flat))).indices
    kept = torch.zeros_like(flat).index_copy(0, chosen, flat[chosen])
    parts = kept.split([gradient.numel() for gradient in gradients.values()])
    return {name: part.view_as(gradient) for (name, gradient), part in zip(gradients.items(), parts, strict=True)}


@pytest.mark.parametrize(
    ("error_feedback", "clip"),
    long_but([(True, 0.1), (False, None)], itertools.product([True, False], [None, 0.1])),
)
def test_trains_like_torch_with_the_same_compression(error_feedback: bool, clip: float | None, tmp_path: Path) -> None:
    """With one tasklet, training equals a torch loop that applies the largest sums of gradient and residual.

    Clipping does not scale the residual. It uses the norm of the gradients before compression.
    """
    recipe = Recipe(max_steps=5, depth=1, precision="32-true", accumulate=2)
    residual: dict[str, torch.Tensor] = {}
    factors: list[float] = []

    def compress(_: int, live: reference.Live) -> None:
        gradients = {name: master.grad for name, master in live.masters.items() if master.grad is not None}
        norm = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients.values()))
        factors.append(1.0 if clip is None else max(1.0, (norm + 1e-6) / clip))
        total = {name: gradient + residual.get(name, torch.zeros(())) for name, gradient in gradients.items()}
        for name, value in sent(total, 0.1).items():
            if error_feedback:
                residual[name] = total[name] - value
            live.masters[name].grad = value / factors[-1]

    expected = reference.train(recipe, before_update=compress)
    assert clip is None or min(factors) > 2
    options = {"compression": TopK(0.1, error_feedback=error_feedback), "overlap": "none"}
    run = Run(out=str(tmp_path), recipe=dataclasses.replace(recipe, clip=clip), options=options)
    (losses, _, _), masters = result(run)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses), atol=1e-5, rtol=0)
    for name, master in expected.masters.items():
        torch.testing.assert_close(masters[name], master, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("everything", long_but([False], [False, True]), ids=["compressed", "everything"])
def test_two_processes(everything: bool, tmp_path: Path) -> None:
    """Sending everything, or overlap and resuming, change no bit on two processes whose partitions have padding."""
    recipe = dataclasses.replace(BASE, odd=True)

    def run(name: str, codec: TopK | None, overlap: str = "none", **settings: Any) -> Run:
        options = {"overlap": overlap, "compression": codec}
        out = str(tmp_path / name)
        return Run(out=out, recipe=recipe, devices=2, transfer=SMALL_RING, options=options, **settings)

    codec = CODECS["top 5 %"]
    if everything:
        dense, other, compressed, forward = launch(
            run("dense", None),
            run("everything", TopK(1.0)),
            run("compressed", codec),
            run("forward", codec, "forward"),
        )
        assert compressed.losses != dense.losses
        pairs = [(other, dense, 0), (forward, compressed, 0)]
    else:
        compressed, backward, resumed = launch(
            run("straight", codec, save_at=(2,)),
            run("backward", codec, "backward"),
            run("resumed", codec, resume=str(tmp_path / "straight" / "step-2.ckpt")),
        )
        pairs = [(backward, compressed, 0), (resumed, compressed, 2 * BASE.accumulate)]
    for outcome, expected, first in pairs:
        assert outcome.losses == expected.losses[first:]
        for name, master in expected.masters.items():
            assert torch.equal(outcome.masters[name], master), name
