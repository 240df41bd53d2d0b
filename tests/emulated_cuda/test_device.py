"""The emulated device is one, and the tests that want a GPU pass on it.

The host cannot touch its memory, and what it is given to do is done late.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.emulated_cuda.build import build, environment
from tests.helpers.runif import RunIf
from tests.helpers.waiting import BUILD_LIMIT, BUILD_TEST_LIMIT, PROCESS_LIMIT
from tests.native.builds import ROOT

# A file of tests takes as long as a build.
pytestmark = [RunIf(torch_without_cuda=True), pytest.mark.timeout(BUILD_TEST_LIMIT)]

BUSY = "torch.cuda._sleep(10**9)"  # a fifth of a second

CASES = {
    "operators give the bits of the CPU": """
        torch.manual_seed(0)
        nn = torch.nn
        layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
        batch = torch.randn(4, 5, 8)
        def trained(layers, batch):
            layers.zero_grad()
            wanted = torch.arange(20, device=batch.device) % 3
            loss = nn.functional.cross_entropy(layers(batch).flatten(0, 1), wanted)
            loss.backward()
            return [loss.detach().cpu(), *(parameter.grad.cpu() for parameter in layers.parameters())]
        expected = trained(layers, batch)
        assert all(map(torch.equal, trained(layers.cuda(), batch.cuda()), expected))
    """,
    "views and results that are resized": """
        values = torch.arange(12.0).view(3, 4)
        device = values.cuda()
        device[:, 1:3].mul_(2)
        values[:, 1:3].mul_(2)
        assert torch.equal(device.cpu(), values)
        assert device.view(-1)[2:].data_ptr() == device.data_ptr() + 8
        assert torch.equal(device.unfold(1, 2, 1).cpu(), values.unfold(1, 2, 1))
        out = torch.empty(0, device="cuda")
        torch.cat([device, device], out=out)
        assert torch.equal(out.cpu(), torch.cat([values, values]))
    """,
    "new memory is full of NaNs": """
        assert torch.empty(100, device="cuda").isnan().all()
    """,
    "a stream's work is done late, and in order": f"""
        values, pinned = torch.ones(100, device="cuda"), torch.zeros(100, pin_memory=True)
        assert pinned.is_pinned()
        {BUSY}
        values.mul_(3)
        pinned.copy_(values, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        assert not done.query() and pinned.sum() == 0
        done.synchronize()
        assert pinned.sum() == 300
    """,
    "another stream that does not wait reads too early": f"""
        values = torch.zeros(100, device="cuda")
        torch.cuda.synchronize()
        other = torch.cuda.Stream()
        {BUSY}
        values.fill_(1)
        with torch.cuda.stream(other):
            assert values.sum().item() == 0
            other.wait_stream(torch.cuda.default_stream())
            assert values.sum().item() == 100
    """,
    "pinned memory is read late": f"""
        pinned = torch.ones(100).pin_memory()
        {BUSY}
        values = pinned.to("cuda", non_blocking=True)
        pinned.fill_(2)
        assert values.sum().item() == 200
    """,
    "memory is used again unless it is recorded": f"""
        other = torch.cuda.Stream()
        for recorded in (False, True):
            values = torch.ones(100, device="cuda")
            where = values.data_ptr()
            torch.cuda.synchronize()
            with torch.cuda.stream(other):
                {BUSY}
                total = values * 2
            if recorded:
                values.record_stream(other)
            del values
            again = torch.full((100,), 5.0, device="cuda")
            torch.cuda.synchronize()
            assert (again.data_ptr() == where) is not recorded
            assert total.sum().item() == (200 if recorded else 1000)
            del again
    """,
    "the core's device is torch's": """
        from lightning_smartinfinity.pipeline.parameters.cuda import link_to
        link = link_to(torch.device("cuda"))
        host = torch.empty(1000, pin_memory=True)
        values = torch.full((1000,), 7.0, device="cuda")
        link.device.copy_to_host(host=host.data_ptr(), device=values.data_ptr(), nbytes=4000, stream=0)
        torch.cuda.synchronize()
        assert host.sum() == 7000
        try:
            link.device.copy_to_host(host=values.data_ptr(), device=host.data_ptr(), nbytes=8, stream=0)
        except Exception as error:
            assert "cuMemcpy" in str(error), error
        else:
            raise AssertionError("host memory passed for the device's")
    """,
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that has the device."""
    return subprocess.run(
        [sys.executable, "-c", "import torch\n" + textwrap.dedent(code)],
        cwd=ROOT,
        env=environment(build(), delay_us=0),
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )


def test_all_cases() -> None:
    """Each case holds; they share one process, because an import of torch takes longer than all of them."""
    compiled = [
        f"exec(compile({textwrap.dedent(code)!r}, {name!r}, 'exec'), {{'torch': torch}})"
        for name, code in CASES.items()
    ]
    done = run("\n".join(compiled))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("access", ["ctypes.string_at(address, 4)", "ctypes.memset(address, 0, 4)"])
def test_the_host_cannot_touch_it(access: str) -> None:
    """A read or write at the address of a device tensor ends the process."""
    done = run(
        f"import ctypes\naddress = torch.ones(8, device='cuda').data_ptr()\nprint('alive', flush=True)\n{access}"
    )
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "alive\n")


# ---- tests that want a GPU, on which the bits of the host are expected elsewhere

FILES = sorted(path.name for path in (ROOT / "tests/gpu").glob("test_*.py"))
USUAL = "test_activation_pool.py"


def test_the_usual_ones_pass(tmp_path: Path) -> None:
    """Activations come and go beside a device that computes, and nothing is lost if calls, copies and waits fail."""
    # Those of failures leave streams that have failed.
    assert_they_pass(tmp_path, f"tests/gpu/{USUAL}", "tests/emulated_cuda/activation_faults.py")


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_all_pass(file: str, tmp_path: Path) -> None:
    """None fails and none is skipped: there are two devices."""
    assert_they_pass(tmp_path, f"tests/gpu/{file}")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 8))
def test_delays(tmp_path: Path, seed: int) -> None:
    """Whatever is late, gradients are those of autograd alone."""
    assert_they_pass(tmp_path, "tests/gpu/test_activations.py", seed=seed)


def assert_they_pass(folder: Path, *files: str, seed: int = 1) -> None:
    """Run the tests of files in one process that has the device.

    Args:
        folder: Folder for temporary files.
        *files: Paths of the files.
        seed: Seed of the delays.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--basetemp={folder / 'inner'}"]
    command.append("--timeout=120")  # below ours, so that the test which hangs is named
    done = subprocess.run(
        [*command, *files],
        cwd=ROOT,
        env=environment(build(), seed=seed),
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT,
    )
    assert done.returncode == 0 and "SKIPPED" not in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
