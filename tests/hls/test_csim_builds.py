"""Tests what only other builds of the kernels show: memory errors, races, deadlocks and a card's checksums."""

from __future__ import annotations

import subprocess

import pytest

from hls.description import ERROR_BITS
from tests.helpers.compressed import BLOCK
from tests.helpers.golden import STEPS, STEPS_OF_RULES
from tests.helpers.runif import RunIf
from tests.helpers.waiting import BUILD_TEST_LIMIT, PROCESS_LIMIT
from tests.hls.simulation import LIBRARIES, PROGRAMS, ROOT, Library, Program, Simulation, built
from tests.hls.tasklet import FORMS, Form, make_tasklet
from tests.xrt.builds import build

pytestmark = pytest.mark.timeout(BUILD_TEST_LIMIT)

RANGES = [(0, 0), (0, 1), (17, 40), (31, 33), (0, 1_100), (1_099, 1_100), (5, 1_095)]
SPARSE, BLOCK_SCALED = FORMS[1], FORMS[-1]
BAD_INDEX, BAD_HEADER, _, _, WRONG_COUNTS, BAD_CODE = ERROR_BITS.values()
SANITIZED = [pytest.param(program, marks=pytest.mark.long) for program in PROGRAMS]


@pytest.fixture(scope="module", params=[*LIBRARIES[1:], *SANITIZED])
def simulation(request: pytest.FixtureRequest) -> Simulation:
    """Each build but the sequential one, which has its own test file."""
    file = built(request.param)
    return Library(file) if request.param in LIBRARIES else Program(file)


@pytest.mark.parametrize("step", [steps[0] for steps in STEPS_OF_RULES.values()], ids=STEPS_OF_RULES)
def test_runs(simulation: Simulation, step: object) -> None:
    """Every form and kind of range gives the same bits, within the buffers, without a race or a deadlock."""
    for seed, form in enumerate(FORMS):
        first, last = RANGES[seed % len(RANGES)]
        tasklet = make_tasklet(step, 1_100, form, seed=seed, special=True)
        tasklet.run(simulation, first, last)
        tasklet.run(simulation, active=False)


@pytest.mark.parametrize("form", [FORMS[3], BLOCK_SCALED], ids=["sparse", "8 bits"])
def test_a_long_run(simulation: Simulation, form: Form) -> None:
    """Every stream is filled to its depth and more, and blocks follow each other."""
    make_tasklet(STEPS["adamw"], BLOCK + 5_000, form).run(simulation, BLOCK - 4_000, BLOCK + 4_000)


def test_bad_payloads(simulation: Simulation) -> None:
    """A payload that is refused, wholly or in its indices or exponents, leaves no process waiting."""
    sparse = [(SPARSE, byte, error) for byte, error in ((0, BAD_HEADER), (64, WRONG_COUNTS), (128, BAD_INDEX))]
    scaled = [(BLOCK_SCALED, byte, error) for byte, error in ((0, BAD_HEADER), (64, BAD_CODE))]
    for form, byte, error in (*sparse, *scaled):
        tasklet = make_tasklet(STEPS["sgd"], 1_000, form)
        tasklet.gradient[byte] ^= 0x80
        assert tasklet.run_words(simulation, tasklet.words(0, 1_000))["errors"] == error


def test_the_standard() -> None:
    """The kernels are C++14, as Vitis HLS 2021.2 to 2023.1 compile them."""
    subprocess.run(
        ["make", "-C", str(ROOT / "hls"), "standard"], check=True, capture_output=True, timeout=PROCESS_LIMIT
    )


@RunIf(xrt=True)
def test_the_emulated_card() -> None:
    """It is built from the kernels, before the tests of cards ask for it in several processes at once."""
    made = build()
    files = (made.driver, made.kernels, made.xclbin, made.probe_xclbin, made.ini)
    assert [file for file in files if not file.stat().st_size] == []
