"""What earlier versions have written is read: storage of a killed fit, checkpoints, universal folders and exports."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_smartinfinity.cli import main
from tests.formats.earlier import DATA, KINDS, STEPS, run


@pytest.fixture(params=sorted(path.name.removesuffix(".tar.xz") for path in DATA.glob("*.tar.xz")))
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with what an earlier version has written."""
    with tarfile.open(DATA / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_goes_on_from_it(kind: str, written: Path) -> None:
    """Parameters and the optimizer's state begin as they were when they were written, bit for bit."""
    folder, sources = written / kind, ("storage", "checkpoint", "universal")
    run("read", kind, folder, *sources)
    for source in sources:
        expected, found = torch.load(folder / "values.pt"), torch.load(folder / f"{source}.pt")
        assert found.pop("step") == expected.pop("step") == STEPS
        for name, values in expected.items():
            assert torch.equal(found[name], values), (source, name)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_exported(kind: str, written: Path) -> None:
    """A checkpoint's weights are exported as they were then."""
    assert main(["export", str(written / kind / "checkpoint"), str(written / "now")]) == 0
    expected = load_file(written / kind / "export" / "model.safetensors")
    found = load_file(written / "now" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
