"""The handler with every state format, against torch, and refused formats. test_programs.py has the bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.errors import ConfigError, StorageCorruptError, StorageError
from lightning_smartinfinity.storage import recover_store
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
every_format = pytest.mark.parametrize(("name", "dtype"), CASES)
TINY = ((1, 0, 0, 0),) * 100 + ((3, 1, 1, 1),) * 100 + ((300, 0, 0, 1), (255, 0, 1, 2), (1, 0, 0, 2))


@every_format
def test_neighbours_do_not_change_a_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Tiny parameters are rounded the same in one segment or in many, because blocks end with parameters."""
    case = Case(dtype=dtype, state_format=name, shapes=TINY)
    alike = case.but(options=(case.options[0], case.options[0]))
    states = []
    for number, variant in enumerate((alike.but(tasklet_bytes=1 << 20), alike, case)):
        with running(tmp_path / str(number), variant) as run:
            run.steps(range(3))
            states.append(run.state())
    assert_equal(states[0], states[1])
    # The parameters of the first group have the same hyperparameters in all.
    first = torch.cat([torch.full((numel,), group == 0) for numel, _, group, _ in TINY])
    for key in ("master", "exp_avg", "exp_avg_sq", "partition"):
        assert torch.equal(states[2][key][first], states[0][key][first])


def test_formats_that_a_store_is_not_in(tmp_path: Path) -> None:
    """Another format than a store's is refused. One of a newer version is refused by name, and is no damage."""
    run = Run(tmp_path, Case(state_format="int8", num_devices=2))
    run.close(remove=False)
    with pytest.raises(ConfigError, match="is in the format 'int8', state_format='fp32' was asked for"):
        recover_store(run.folders, state_format="fp32")
    store = recover_store(run.folders, state_format="int8")
    assert (store.manifest.state_format, store.manifest.folders) == ("int8", tuple(map(str, run.folders)))
    store.close(remove=False)
    for path in tmp_path.rglob("manifest.json"):
        path.write_bytes(manifest_with(json.loads(path.read_text()) | {"state_format": "int2"}))
    with pytest.raises(StorageError, match="in the format 'int2'; this package reads fp32, bf16, int8") as refused:
        recover_store(run.folders)
    assert not isinstance(refused.value, StorageCorruptError) and "version" in refused.value.remedy
