"""The handler with every state format: bits that must not change, exact round trips, and bytes moved."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_smartinfinity.errors import ConfigError, SmartInfinityError, StorageCorruptError, StorageError
from lightning_smartinfinity.pipeline.state.windows import Window
from lightning_smartinfinity.storage import recover_store
from tests.helpers.native_testing import inject
from tests.pipeline.harness import Case, Run, assert_equal, running
from tests.storage.makers import manifest_with

# (format, dtype of the parameters): int8_remainder needs bf16.
CASES = [
    ("bf16", torch.float32),
    ("bf16", torch.bfloat16),
    ("int8", torch.float32),
    ("int8", torch.float16),
    ("int8_remainder", torch.bfloat16),
]
FP32 = [("fp32", torch.float32), ("fp32", torch.bfloat16), ("fp32", torch.float16)]
IDS = [f"{name}-{str(dtype).removeprefix('torch.')}" for name, dtype in CASES + FP32]
every_format = pytest.mark.parametrize(("name", "dtype"), CASES, ids=IDS[: len(CASES)])
TINY = ((1, 0, 0, 0),) * 300 + ((3, 1, 1, 1),) * 300 + ((300, 0, 0, 1), (255, 0, 1, 2), (1, 0, 0, 2))


@pytest.mark.parametrize(("name", "dtype"), CASES + FP32, ids=IDS)
def test_settings_do_not_change_a_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Tasklet size, ring, devices, threads, durability and staging do not change a bit."""
    case = Case(dtype=dtype, state_format=name)
    with running(tmp_path / "plain", case) as run:
        run.steps(range(4))
        expected = run.state()
    variants = [
        case.but(tasklet_bytes=1 << 20),
        case.but(tasklet_bytes=100_000, num_buffers=2),
        case.but(num_devices=3, num_buffers=8, compute_threads=2),
        case.but(durability="none"),
        case.but(durability="power", staged=True, num_buffers=2),
        case.but(staged=True, num_devices=2, tasklet_bytes=70_000, num_buffers=16),
    ]
    for number, variant in enumerate(variants):
        with running(tmp_path / str(number), variant) as run:
            run.steps(range(4))
            assert_equal(run.state(), expected)


@every_format
def test_neighbours_do_not_change_a_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Tiny parameters are rounded the same in one segment or in many, because blocks end with parameters."""
    case = Case(dtype=dtype, state_format=name, shapes=TINY)
    other = case.but(options=(case.options[0], case.options[0]))
    states = []
    for number, variant in enumerate((other.but(tasklet_bytes=1 << 20), other)):
        with running(tmp_path / str(number), variant) as run:
            run.steps(range(3))
            states.append(run.state())
    assert_equal(states[0], states[1])
    with running(tmp_path / "groups", case) as run:
        run.steps(range(3))
        state = run.state()
    # The parameters of the first group have the same hyperparameters in both.
    first = torch.cat(
        [torch.full((numel,), group == 0) for numel, _, group, _ in TINY],
    )
    for key in ("master", "exp_avg", "exp_avg_sq", "partition"):
        assert torch.equal(state[key][first], states[0][key][first])


@every_format
def test_masters_follow_torch(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Rounded moments keep masters within a fraction of the learning rate of torch's."""
    with running(tmp_path, Case(dtype=dtype, state_format=name)) as run:
        for number in range(8):
            run.step(number)
            run.optimizer.step()
        moved = []
        for index, parameter in enumerate(run.parameters):
            found = torch.from_numpy(run.handler.state.read_parameter(index)["master"])
            moved.append((found - parameter.detach()).abs())
        assert torch.cat(moved).mean() < (2e-4 if name == "bf16" else 2e-3)
        state = run.state()
        torch.testing.assert_close(state["partition"], state["master"].to(dtype), rtol=0, atol=0)
        for where in run.layout.parameters:
            padding = slice(where.offset + where.real_numel, where.offset + where.numel)
            assert not state["partition"][padding].any() and not state["exp_avg_sq"][padding].any()


def copied(run: Run, folder: Path, case: Case) -> Run:
    """Return another run with the first one's state and parameters, as after loading a checkpoint."""
    other = Run(folder, case)
    arrays = {key: value.numpy() for key, value in run.state().items() if key not in ("partition", "steps")}

    def fill(window: Window) -> None:
        for array, key in zip(window.arrays, ("master", "exp_avg", "exp_avg_sq"), strict=True):
            array[:] = arrays[key][window.begin : window.end]

    other.handler.state.replace(fill, steps=run.handler.steps)
    for tensor, group in zip(other.partition, run.layout.sub_groups, strict=True):
        tensor.copy_(torch.from_numpy(arrays["master"][group.offset : group.offset + group.numel]))
    return other


@every_format
def test_resuming_in_the_same_format_is_exact(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """State read as fp32 and written back gives the same bits in later steps, for any tasklet size."""
    case = Case(dtype=dtype, state_format=name)
    with running(tmp_path / "whole", case) as run:
        run.steps(range(3))
        other = copied(run, tmp_path / "resumed", case.but(tasklet_bytes=150_000, num_devices=2))
        try:
            assert_equal(other.state(), run.state())
            for each in (run, other):
                each.steps(range(3, 6))
            assert_equal(other.state(), run.state())
        finally:
            other.close()


@pytest.mark.parametrize("other_name", ["fp32", "bf16", "int8", "int8_remainder"])
def test_resuming_in_another_format(tmp_path: Path, other_name: str) -> None:
    """State in one format can be continued in any other, which keeps what it can represent."""
    for name in ("fp32", "int8_remainder"):
        case = Case(dtype=torch.bfloat16, state_format=name)
        with running(tmp_path / name / "first", case) as run:
            run.steps(range(3))
            other = copied(run, tmp_path / name / "second", case.but(state_format=other_name))
            try:
                before, after = run.state(), other.state()
                torch.testing.assert_close(after["master"], before["master"], rtol=1e-6, atol=0)
                assert torch.equal(after["partition"], before["partition"])
                torch.testing.assert_close(after["exp_avg_sq"], before["exp_avg_sq"], rtol=0.07, atol=1e-9)
                other.step(3)
            finally:
                other.close()


@every_format
@pytest.mark.parametrize("staged", [False, True])
def test_rollback_is_exact(tmp_path: Path, name: str, dtype: torch.dtype, staged: bool) -> None:
    """A step that fails half-way can be rolled back exactly and repeated."""
    case = Case(dtype=dtype, state_format=name, staged=staged)
    with running(tmp_path / "whole", case) as run:
        run.steps(range(3))
        expected = run.state()
    with running(tmp_path / "failing", case) as run:
        run.steps(range(2))
        before = run.state()
        inject(run.device.pipeline, fail_write_at=2)
        run.handler.begin_step(run.collect(2))
        with pytest.raises(SmartInfinityError):
            run.handler.commit()
        run.handler.roll_back()
        assert_equal(run.state(), before)
        run.step(2)
        assert_equal(run.state(), expected)


@pytest.mark.parametrize(
    ("name", "dtype", "read_bytes", "written_bytes"),
    [
        ("fp32", torch.float32, 8, 12),
        ("bf16", torch.bfloat16, 8, 8),
        ("bf16", torch.float32, 4, 8),
        ("int8", torch.bfloat16, 6, 6),
        ("int8", torch.float32, 2, 6),
        ("int8_remainder", torch.bfloat16, 4, 6),
    ],
)
def test_traffic(tmp_path: Path, name: str, dtype: torch.dtype, read_bytes: int, written_bytes: int) -> None:
    """A step moves the documented bytes per parameter, plus exponents and trailers."""
    numel = 40_960
    case = Case(dtype=dtype, state_format=name, shapes=((numel, 0, 0, 0),), tasklet_bytes=1 << 20)
    with running(tmp_path, case) as run:
        before = run.handler.traffic()
        run.step(1)
        after = run.handler.traffic()
        overhead = 4096 + (4096 if name.startswith("int8") else 0)
        assert after.shared_read_bytes - before.shared_read_bytes == read_bytes * numel + overhead
        assert after.shared_write_bytes - before.shared_write_bytes == written_bytes * numel + overhead


@every_format
def test_parameters_read_and_modified(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Replacing one parameter's arrays leaves every bit of the other parameters as it was."""
    with running(tmp_path, Case(dtype=dtype, state_format=name)) as run:
        run.steps(range(2))
        before = [run.handler.state.read_parameter(index) for index in range(len(run.parameters))]
        ones = np.ones(6_000 - 3, np.float32)
        run.handler.state.modify({3: {"exp_avg": ones, "exp_avg_sq": 2 * ones}})
        for index, arrays in enumerate(before):
            if index == 3:
                arrays = {"master": arrays["master"], "exp_avg": ones, "exp_avg_sq": 2 * ones}
            for key, values in run.handler.state.read_parameter(index).items():
                np.testing.assert_array_equal(values.view(np.uint32), arrays[key].view(np.uint32))


@every_format
def test_recovery(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """A store is recovered in its own format. Asking for another format is refused."""
    case = Case(dtype=dtype, state_format=name, num_devices=2)
    run = Run(tmp_path, case)
    run.steps(range(2))
    expected = run.state()
    run.close(remove=False)
    folders = [str(tmp_path / f"disk{index}") for index in range(2)]
    with pytest.raises(ConfigError, match=f"is in the format '{name}', state_format='fp32' was asked for"):
        recover_store(run.folders, state_format="fp32")
    recover_store(run.folders, state_format=name).close(remove=False)
    with running(tmp_path, case, recover=True) as recovered:
        recovered.partition = run.partition
        assert recovered.store.manifest.state_format == name
        assert recovered.store.manifest.folders == tuple(folders)
        assert_equal(recovered.state(), expected)


def test_unknown_format_in_a_manifest(tmp_path: Path) -> None:
    """A store in an unknown format, as of a newer version, is refused with the format's name. It is not damaged."""
    run = Run(tmp_path, Case())
    run.close(remove=False)
    path = next(tmp_path.rglob("manifest.json"))
    path.write_bytes(manifest_with(json.loads(path.read_text()) | {"state_format": "int2"}))
    with pytest.raises(StorageError, match="in the format 'int2'; this package reads fp32, bf16, int8") as refused:
        recover_store(run.folders)
    assert not isinstance(refused.value, StorageCorruptError) and "version" in refused.value.remedy
