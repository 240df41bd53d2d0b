"""Memory that goes back to a system with pages of 16 or 64 KiB takes nothing with it that is lent or taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.fresh_python import fresh_python
from tests.native.builds import built_once

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
"""


@pytest.mark.parametrize(
    ("code", "page_bytes"), [(LEASES, 64 << 10), (GRADIENTS, 16 << 10)], ids=["leases", "gradients"]
)
def test_what_lies_in_the_same_page_stays(code: str, page_bytes: int, tmp_path: Path) -> None:
    """Every lease and every block keeps its bytes while the memory beside it goes back to the system."""
    library = built_once("liblargepages.so", Path(__file__).with_name("large_pages.cpp"))
    environment = {"LD_PRELOAD": str(library), "EMULATED_PAGE_BYTES": str(page_bytes)}
    fresh_python(f"PAGE = {page_bytes}\n{code}", cwd=tmp_path, autoload=False, **environment)
