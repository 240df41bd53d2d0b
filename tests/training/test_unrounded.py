"""What is written to parameters in 16 bit keeps the precision that memory has in Lightning's mixed precisions: fp32."""

from __future__ import annotations

import copy
import errno
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import quiet_trainer

DECAY = 0.999


class Distilled(pl.LightningModule):
    """A student with a teacher that follows it, and a mean of its own; weights are numbers of bf16 at first."""

    def __init__(
        self, write: Callable[[Distilled], None] | None = None, lr: float = 0.0, *, validated: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 1))
        for param in self.student.parameters():
            param.data = param.data.bfloat16().float()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.mean = [param.detach().clone() for param in self.student.parameters()]
        self.write, self.lr, self.validated, self.state = write, lr, validated, "none"
        self.found: dict[str, list[torch.Tensor]] = {}

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return ((self.student(batch) - 1) ** 2).mean()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.student(batch), self.teacher(batch)

    def on_train_batch_end(self, *args: object) -> None:
        if self.write is not None and not self.validated:
            with torch.no_grad():
                self.write(self)

    def on_validation_end(self) -> None:
        if self.write is not None:
            with torch.no_grad():
                self.write(self)

    def on_train_end(self) -> None:
        self.found = {
            "student": [masters(param) for param in self.student.parameters()],
            "teacher": [param.detach().float() for param in self.teacher.parameters()],
            "mean": self.mean,
        }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.state != "none":
            groups = [{"params": list(layer.parameters())} for layer in (self.student[2], self.student[0])]
            optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0)
            if self.state == "stepped adam":
                optimizer.load_state_dict(stepped_adam().state_dict())
            return optimizer
        return torch.optim.SGD(self.student.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(6, 8), batch_size=2)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self.train_dataloader() if self.validated else []


def stepped_adam() -> torch.optim.Optimizer:
    """Return an optimizer that has updated parameters of the student's shapes in memory."""
    shapes = ((1, 33), (1,), (33, 8), (33,))
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr=0.0, weight_decay=0.0)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def masters(param: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of a parameter, here or in memory."""
    full = safe_get_full_fp32_param(param) if hasattr(param, "ds_id") else None
    return param.detach().float() if full is None else full


def pairs(module: Distilled) -> Any:
    """Return the parameters of the student with those of the teacher."""
    return zip(module.student.parameters(), module.teacher.parameters(), strict=True)


def scale(module: Distilled) -> None:
    for param in module.student.parameters():
        param.data.mul_(DECAY)


def scale_by_lists(module: Distilled) -> None:
    torch._foreach_mul_([param.data for param in module.student.parameters()], DECAY)


def draw(module: Distilled) -> None:
    torch.manual_seed(3)
    nn.init.normal_(module.student[0].weight, std=0.1)
    module.student[0].weight.data[1].uniform_()


def write_parts(module: Distilled) -> None:
    weight = module.student[0].weight.data
    weight[:, 2:4].add_(1e-4)
    weight[torch.tensor([1, 5])] = weight.float()[torch.tensor([1, 5])] * DECAY
    weight[2:6:3] *= DECAY
    weight.T[0].clamp_(-0.01, 0.01)
    weight.index_copy_(0, torch.tensor([7]), torch.full((1, 8), 1 / 3))
    weight.masked_scatter_(weight > 0.3, torch.full((264,), 1 / 7))
    module.student[2].bias.data.fill_(1 / 3)


def follow(module: Distilled) -> None:
    scale(module)
    for own, its in pairs(module):
        its.lerp_(own, 1 - DECAY)


def follow_by_data(module: Distilled) -> None:
    scale(module)
    for own, its in pairs(module):
        its.data.mul_(DECAY).add_(own.data, alpha=1 - DECAY)


def average(module: Distilled) -> None:
    scale(module)
    torch._foreach_lerp_(module.mean, [param.detach() for param in module.student.parameters()], 1 - DECAY)
    module.mean[0].copy_(module.student[0].weight.detach())
    module.mean[2].add_(module.teacher[2].weight.float())


def swap(module: Distilled) -> None:
    follow(module)
    for _ in range(3):
        for own, its in pairs(module):
            own.data, its.data = its.data, own.data


def keep(module: Distilled) -> None:
    scale(module)
    for param in module.student.parameters():
        kept = param.detach().clone()
        param.copy_(kept)
        param[:1] = kept[:1]
        param[1:].fill_(0.125)


def load(module: Distilled) -> None:
    scale(module)
    saved = {name: value.float() * DECAY for name, value in module.student.state_dict().items()}
    module.teacher.load_state_dict(saved)


def compute(module: Distilled) -> None:
    """Call operations that torch lacks in 16 bit, and write by a view that was taken before."""
    scale(module)
    weight = module.student[0].weight
    kept = weight.detach()[1:]
    nn.init.orthogonal_(weight)
    weight.addmm_(torch.full((33, 2), DECAY), torch.full((2, 8), 1 / 3))
    kept.mul_(DECAY)
    module.mean[0][0, 0] = torch.linalg.svdvals(weight)[0].round(decimals=4)
    module.student[2].weight[0, :4] -= 1e-4


def follow_by_type(module: Distilled) -> None:
    """Average as latent diffusion's LitEma does, and in a compiled function."""
    scale(module)
    shadow = module.mean[0].type_as(module.student[0].weight)
    shadow.sub_((1 - DECAY) * (shadow - module.student[0].weight))
    assert shadow is module.mean[0]
    assert module.mean[2].to(module.student[2].weight.data) is module.mean[2]
    torch.compile(lambda own, its: its.lerp_(own, 1 - DECAY), backend="eager")(
        module.student[2].weight, module.teacher[2].weight
    )


TWO_RANKS = [scale, draw, write_parts, follow, swap, load]
WRITES = [
    scale,
    scale_by_lists,
    draw,
    write_parts,
    follow,
    follow_by_data,
    average,
    swap,
    load,
    keep,
    compute,
    follow_by_type,
]


@pytest.mark.parametrize(
    ("write", "place"),
    [
        *((write, "memory") for write in WRITES),
        *((write, "storage") for write in (write_parts, follow, swap)),
        *((write, "validated") for write in WRITES),
    ],
)
def test_writes_are_those_to_fp32_parameters(write: Callable[[Distilled], None], place: str, tmp_path: Path) -> None:
    """Masters, a teacher and a mean have the bits of fp32 arithmetic, with parameters in memory or on storage.

    After a validation parameters are still whole.
    """
    found = {}
    for strategy in ("auto", ours(tmp_path, place)):
        module = Distilled(write, validated=place == "validated")
        settings = {"val_check_interval": 1, "num_sanity_val_steps": 0} if module.validated else {}
        quiet_trainer(tmp_path, strategy, precision="bf16-mixed", **settings).fit(module)
        found[strategy] = module.found
    (theirs, own) = found.values()
    assert_equal(own, theirs)


def ours(root: Path, place: str = "memory") -> SmartInfinityStrategy:
    """Return the strategy, with parameters in memory or on storage."""
    stored: Any = {"zero": {"offload_param": {"device": "nvme"}}, "transfer": TransferConfig(parameter_bytes="64KB")}
    return SmartInfinityStrategy(root / "storage", **(stored if place == "storage" else {}))


def train_on_ranks(root: Path) -> dict[str, Any]:
    """Return what each write has found, what a second fit has, and what a resumed one has."""
    settings: dict[str, Any] = {"devices": 2, "precision": "bf16-mixed", "use_distributed_sampler": False}
    found = {}
    for write in TWO_RANKS:
        module = Distilled(write)
        quiet_trainer(root, ours(root), **settings).fit(module)
        found[write.__name__] = module.found
    module.write = None
    quiet_trainer(root, ours(root), **settings).fit(module)
    return found | {"second fit": module.found, **whole_and_resumed(root, **settings)}


def whole_and_resumed(root: Path, **settings: Any) -> dict[str, Any]:
    """Return what is found by a training of four steps, and by one that is saved after two and resumed."""
    whole, resumed = Distilled(follow, lr=0.1), Distilled(follow, lr=0.1)
    quiet_trainer(root, ours(root), max_steps=4, **settings).fit(whole)
    begun = quiet_trainer(root, ours(root), max_steps=2, **settings)
    begun.fit(Distilled(follow, lr=0.1))
    begun.save_checkpoint(root / "two.ckpt")
    again = quiet_trainer(root, ours(root), max_steps=4, **settings)
    again.fit(resumed, ckpt_path=root / "two.ckpt", weights_only=False)
    return {"whole": whole.found, "resumed": resumed.found}


def assert_equal(one: dict[str, Any], other: dict[str, Any], *names: str) -> None:
    for name in names or other:
        torch.testing.assert_close(
            one[name], other[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_two_ranks_write_what_memory_writes(tmp_path: Path) -> None:
    """Each has its slices in fp32, whose sizes are not multiples of two, and a resumed training ends alike."""
    ranks = on_ranks(train_on_ranks, tmp_path)
    for write in TWO_RANKS:
        module = Distilled(write)
        quiet_trainer(tmp_path, "auto", precision="bf16-mixed").fit(module)
        for found in ranks:
            assert_equal(found[write.__name__], module.found)
    for found in ranks:
        assert_equal(found["second fit"], found[TWO_RANKS[-1].__name__])
        assert_equal(found["resumed"], found["whole"], "student", "teacher")


def test_a_teacher_resumes_with_every_bit(tmp_path: Path) -> None:
    """A training that is saved after the second step and resumed ends as one that never stopped, in fp16, too."""
    found = whole_and_resumed(tmp_path, precision="16-mixed")
    assert_equal(found["resumed"], found["whole"], "student", "teacher")
    assert any((value.bfloat16().float() != value).any() for value in found["whole"]["teacher"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_hooks_read_the_dtype_of_memory(precision: Any, tmp_path: Path) -> None:
    """In a mixed precision copies, norms and arrays are fp32, also of operations that torch lacks in 16 bit."""

    def read(module: Distilled) -> None:
        weight = module.student[0].weight
        found = [weight.clone(), weight.norm(), weight * 2, weight - module.teacher[0].weight, torch.zeros_like(weight)]
        found += [param.detach().clone() for param in module.teacher.parameters()]
        if precision == "bf16-mixed":
            found += [
                torch.linalg.svdvals(weight),
                torch.quantile(weight, 0.5),
                torch.from_numpy(weight.numpy().copy()),
            ]
        dtypes.extend(tensor.dtype for tensor in found)
        values.extend(float(tensor.double().sum()) for tensor in found)

    expected = []
    for strategy in ("auto", None):
        dtypes: list[torch.dtype] = []
        values: list[float] = []
        quiet_trainer(tmp_path / str(strategy), strategy, precision=precision).fit(Distilled(read))
        expected.append((dtypes, values))
    assert expected[1][0] == expected[0][0]
    assert expected[1][1] == pytest.approx(expected[0][1], rel=1e-5)


@pytest.mark.parametrize(("place", "state"), [("memory", "adam"), ("storage", "adam"), ("memory", "stepped adam")])
def test_a_second_fit_goes_on_in_fp32(place: str, state: str, tmp_path: Path) -> None:
    """Its masters are those of the first, also of what was written in between, by other groups and optimizers."""
    found: dict[Any, list[Any]] = {}
    for strategy in ("auto", "ours"):
        module = Distilled(scale)
        for number in range(3):
            chosen = strategy if strategy == "auto" else ours(tmp_path / str(number % 2), place)
            quiet_trainer(tmp_path, chosen, precision="bf16-mixed").fit(module)
            found.setdefault(strategy, []).append([value.clone() for value in module.found["student"]])
            with torch.no_grad():
                module.student[2].weight.mul_(DECAY)
            module.write, module.state = None, state
            gc.collect()
    for values, expected in zip(found["ours"], found["auto"], strict=True):
        for value, wanted in zip(values, expected, strict=True):
            assert torch.equal(value, wanted)
    assert any((value.bfloat16().float() != value).any() for value in found["ours"][2])


@pytest.mark.parametrize("state", ["adam", "stepped adam"])
def test_a_fit_goes_on_from_what_an_evaluation_wrote(state: str, tmp_path: Path) -> None:
    """Its masters are the fp32 values that a hook wrote, also with an optimizer that has stepped before."""
    found = []
    for strategy in ("auto", ours(tmp_path)):
        module = Distilled(scale, validated=True)
        trainer = quiet_trainer(tmp_path, strategy, precision="bf16-mixed")
        trainer.validate(module, verbose=False)
        module.write, module.state = None, state
        trainer.fit(module)
        found.append(module.found["student"])
    assert all(torch.equal(*values) for values in zip(*found, strict=True))
    assert any((value.bfloat16().float() != value).any() for value in found[1])


@pytest.mark.parametrize(("is_closed", "why"), [(True, "was closed"), (False, "No space left")])
def test_a_second_fit_whose_masters_are_gone(
    is_closed: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins from weights in 16 bit, and a warning says so and why."""
    module = Distilled(scale)
    strategy = ours(tmp_path)
    quiet_trainer(tmp_path, strategy, precision="bf16-mixed").fit(module)
    first = module.found["student"]
    if is_closed:
        strategy.close()
    monkeypatch.setattr(tempfile, "TemporaryFile", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    module.write = None
    with pytest.warns(UserWarning, match=rf"{why}.* rounded to torch.bfloat16, .* before the strategy is closed"):
        quiet_trainer(tmp_path, precision="bf16-mixed").fit(module)
    for value, before in zip(module.found["student"], first, strict=True):
        assert torch.equal(value, before.bfloat16().float())


def test_hooks_call_modules_with_fp32(tmp_path: Path) -> None:
    """Sample predictions in a hook take the inputs of memory."""

    class Sampling(Distilled):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv1d(1, 2, 3), nn.LayerNorm(6), nn.Flatten(), nn.Linear(12, 1))

        def sample(self) -> None:
            value = self.student(torch.ones(1, 8)) + self.layers(torch.ones(1, 1, 8))
            assert torch.isfinite(value).all()
            self.mean.append(value.detach().float())

        on_train_start = on_train_epoch_end = sample

    found = []
    for strategy in ("auto", None):
        module = Sampling()
        quiet_trainer(tmp_path / str(strategy), strategy, precision="bf16-mixed", max_epochs=1).fit(module)
        found.append(module.mean[4:])
    assert len(found[1]) == 2
    for value, expected in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=3e-2, atol=3e-2)


def test_forward_reads_sixteen_bit(tmp_path: Path) -> None:
    """Within training_step a weight goes with activations; linear layers take fp32 inputs, as under autocast."""

    class Reading(Distilled):
        def forward(self, batch: torch.Tensor) -> Any:
            return self.student(batch)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            hidden = nn.functional.linear(self.student[0](batch).tanh(), self.student[2].weight * 2)
            wide = nn.functional.linear(torch.ones(2, 33, dtype=torch.float32), self.student[2].weight)
            rows = nn.functional.linear(self.student[2].weight, torch.ones(2, 33).bfloat16(), self.student[0].bias[:2])
            behind = self.student[0](batch + torch.arange(8).float())
            whole = self(batch) + nn.functional.linear(torch.ones(2, 33), self.student[2].weight)
            return hidden.mean() + wide.mean() + rows.mean() + behind.mean() + whole.mean()

    module = Reading(lr=0.1)
    strategy = SmartInfinityStrategy(tmp_path / "storage", zero={"stage3_param_persistence_threshold": 0})
    quiet_trainer(tmp_path, strategy, precision="bf16-mixed").fit(module)
    for index in (0, 2):  # the weights
        assert (module.found["student"][index] != module.mean[index]).any()
