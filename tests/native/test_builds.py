"""What is built of the native sources: its symbols, and its behaviour in special builds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.fresh_python import fresh_python
from tests.helpers.native_testing import crc32c_widths, supported_instruction_sets
from tests.helpers.runif import RunIf
from tests.helpers.waiting import BUILD_TEST_LIMIT
from tests.native.builds import ROOT, built_once, locked, run


@pytest.mark.parametrize(
    ("source", "kinds", "name"),
    [
        *(
            (f"kernels_{choice.name.lower()}", "DR", r"smart_infinity::k\w+Kernels")
            for choice in supported_instruction_sets()
        ),
        *((f"crc32c_{width}", "T", f"smart_infinity::extend_crc32c_{width}") for width in crc32c_widths()[1:]),
    ],
)
def test_only_one_symbol_is_visible(source: str, kinds: str, name: str) -> None:
    """Only the table of kernels or the checksum is visible, so the linker cannot choose code that a CPU cannot run."""
    objects = (ROOT / "build").glob(f"cp*/CMakeFiles/*/**/{source}*.cpp.o")  # the package was linked from the newest
    symbols = run("nm", "-C", "-g", max(objects, key=lambda path: path.stat().st_mtime)).stdout.splitlines()
    [[kind, symbol]] = [line[17:].split(maxsplit=1) for line in symbols]
    assert kind in kinds and re.fullmatch(name, symbol.partition("(")[0])


# ---- the native core under the compilers' sanitizers, and on ARM, in random scenarios (stress*.cpp)


PROGRAMS = (
    "stress",
    "stress_card",
    "stress_formats",
    "stress_gradients",
    "stress_queue",
    "stress_ring",
    "stress_watch",
)


def built(kind: str, *options: str) -> Path:
    """Return the folder of the programs, in which only what changed is compiled again."""
    folder = ROOT / "build" / f"stress_{kind.replace(',', '_')}"
    # A unity build is faster, since nearly all of the time goes into headers.
    switches = ["CMAKE_UNITY_BUILD=ON", "SMART_INFINITY_BUILD_STRESS=ON", "SMART_INFINITY_BUILD_MODULE=OFF"]
    with locked(folder / "lock"):
        run("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *(f"-D{option}" for option in [*options, *switches]))
        run("cmake", "--build", folder, "--target", *PROGRAMS, "--parallel", "4")
    return folder


def built_with(sanitizers: str) -> Path:
    """Return the folder of the programs with these sanitizers."""
    return built(sanitizers, "CMAKE_BUILD_TYPE=Debug", f"SMART_INFINITY_SANITIZE={sanitizers}")


def built_for_arm() -> Path:
    """Return the folder of the programs for ARM, with all optimizations."""
    return built("arm", f"CMAKE_TOOLCHAIN_FILE={Path(__file__).with_name('aarch64.cmake')}")


def stressed(build: Path, program: str, folder: Path, num_seeds: int, *emulator: str) -> str:
    """Run a program, which has to find nothing wrong, and return what it prints."""
    command = (*emulator, build / program, folder, "0", str(num_seeds), build / "libfake_cuda.so")
    completed = run(*command, expect_success=False)
    if "unexpected memory mapping" in completed.stderr:
        # Older thread sanitizers know fewer address-space layouts than kernels use.
        completed = run("setarch", "-R", *command, expect_success=False)
    told = f"{program}\n{completed.stdout}\n{completed.stderr}"
    assert completed.returncode == 0, told
    assert re.fullmatch(rf"{num_seeds} scenarios, digest [0-9a-f]{{8}}\n", completed.stdout), told
    return completed.stdout


@pytest.mark.timeout(BUILD_TEST_LIMIT)
@pytest.mark.long
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_stress(tmp_path: Path, sanitizers: str) -> None:
    """There is no bad access, leak, undefined behaviour or race, and every bit equals that of a plain loop."""
    build = built_with(sanitizers)
    for program in PROGRAMS:
        stressed(build, program, tmp_path, 200)


@RunIf(arm=True)
@pytest.mark.timeout(BUILD_TEST_LIMIT)
@pytest.mark.long
@pytest.mark.parametrize("page_bytes", [4 << 10, 64 << 10])
def test_on_arm(tmp_path: Path, page_bytes: int) -> None:
    """On ARM, emulated, nothing is wrong either, and every result has the same bits as on this machine."""
    here, there = built_with("address,undefined"), built_for_arm()
    emulator = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-p", str(page_bytes))
    for program in PROGRAMS:
        assert stressed(there, program, tmp_path, 30, *emulator) == stressed(here, program, tmp_path, 30), program


def loops_on_arm(source: str) -> dict[str, list[str]]:
    """Return the loops of each function of an object file that has any, each loop as the text of its instructions."""
    [code] = built_for_arm().glob(f"CMakeFiles/*/**/{source}.cpp.o")
    listing = run("aarch64-linux-gnu-objdump", "-dC", "--no-show-raw-insn", code).stdout
    found: dict[str, list[str]] = {}
    for name, body in re.findall(r"^\w+ <(.+)>:\n((?:.+\n)+)", listing, re.MULTILINE):
        lines = [line.strip().partition(":\t")[::2] for line in body.splitlines()]
        numbers = {address: number for number, (address, _) in enumerate(lines)}
        for end, (_, instruction) in enumerate(lines):
            jump = re.match(r"(?:b|b\.\w+|cbn?z|tbn?z)\t(?:.*\t| .*)?(?:.*, )?([0-9a-f]+) <", instruction)
            if jump and (first := numbers.get(jump[1], end + 1)) <= end:
                found.setdefault(name, []).append("\n".join(text for _, text in lines[first : end + 1]))
    return found


@RunIf(arm=True)
@pytest.mark.timeout(BUILD_TEST_LIMIT)
@pytest.mark.long
def test_loops_on_arm() -> None:
    """All kernels work on whole vectors, and the checksum by CRC instructions and multiplications at the same time."""
    kernels = loops_on_arm("kernels_scalar")
    for name, loops in kernels.items():
        roots = "update" in name and "SgdStep" not in name
        whole = r"^fsqrt\tv\d+\.4s" if roots else r"^st[rp]\tq|^\w+\tv\d+\.(4s|2d), v\d+\.(4s|2d), v"
        assert any(re.search(whole, loop, re.MULTILINE) for loop in loops), name
    for rule, number in (("Adam", 48), ("Adagrad", 12), ("Sgd", 12), ("Rmsprop", 12)):
        assert sum(f"{rule}Step" in name for name in kernels) == number
    [loops] = loops_on_arm("crc32c_128_arm").values()
    assert any((loop.count("crc32cx"), loop.count("pmull")) == (12, 6) for loop in loops)


# ---- memory that goes back to a system with pages of 16 or 64 KiB takes nothing with it that is lent or taken


# Both give memory back in whole pages: what is beside it stays, and what is alone in its pages takes up no memory.
LEASES = """
import gc, random
import numpy as np
from lightning_smartinfinity import native

def view(lease):
    return np.frombuffer(lease.memoryview(), np.uint8)

pool, choose, held = native.MemoryPool(), random.Random(1), []
pool.limit = 1 << 20
for number in range(600):
    if held and choose.random() < 0.5:
        lease, expected = held.pop(choose.randrange(len(held)))
        assert (view(lease) == expected).all(), f"lease {number} lost its bytes"
        del lease
    held.append((pool.take(choose.randint(1, 40) * 4096), number % 255 + 1))
    view(held[-1][0])[:] = held[-1][1]
for lease, expected in held:
    assert (view(lease) == expected).all()
del lease
held = [held[0]]
gc.collect()
pool.limit = 0
assert pool.nbytes - pool.lent_bytes < 2 * PAGE, "idle memory stays"
del held
gc.collect()
assert pool.nbytes == 0
"""
GRADIENTS = """
import random
import numpy as np
from lightning_smartinfinity import native

BLOCKS, BLOCK = 201, 4096
memory, choose, taken = native.GradientMemory(BLOCKS * BLOCK, granule=BLOCK), random.Random(1), {}
values = np.frombuffer(memory.memoryview(), np.uint8).reshape(BLOCKS, BLOCK)
for number in range(3000):
    block = choose.randrange(BLOCKS)
    if block in taken:
        assert (values[block] == taken.pop(block)).all(), f"block {block} lost its bytes"
        memory.drop(block * BLOCK, BLOCK)
    else:
        memory.take(block * BLOCK, BLOCK)
        values[block] = taken[block] = number % 255 + 1
assert all((values[block] == expected).all() for block, expected in taken.items())
for block in taken:
    memory.drop(block * BLOCK, BLOCK)
assert not values.any(), "what is dropped takes up memory"

# The plain engine drops what it has read from the page cache, also where a request begins or ends within a page.
with open("read", "wb") as file:
    file.write(bytes(BLOCKS * BLOCK))
queue, file = native.FileQueue(io_engine="plain"), native.StateFile("read", direct=False)
for block in (0, 3, 5):
    assert queue.wait(queue.read(file, offset=block * BLOCK, address=values.ctypes.data, nbytes=3 * BLOCK)) is None
"""


@pytest.mark.parametrize(
    ("code", "page_bytes"), [(LEASES, 64 << 10), (GRADIENTS, 16 << 10)], ids=["leases", "gradients"]
)
def test_what_lies_in_the_same_page_stays(code: str, page_bytes: int, tmp_path: Path) -> None:
    """Every lease and every block keeps its bytes while the memory beside it goes back to the system."""
    fresh_python(
        f"PAGE = {page_bytes}\n{code}",
        cwd=tmp_path,
        autoload=False,
        LD_PRELOAD=str(built_once("liblargepages.so", Path(__file__).with_name("large_pages.cpp"))),
        EMULATED_PAGE_BYTES=str(page_bytes),
    )
