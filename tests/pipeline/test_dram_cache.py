"""The cache of state in host memory: fewer bytes moved, nothing stale. test_programs.py has the bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.pipeline.layout.partition_layout import with_residents
from lightning_smartinfinity.storage import recover_store
from tests.pipeline.harness import Case, Run, layout_of, running

EVERYTHING = 1 << 30


def sizes(case: Case) -> list[int]:
    return [extent.nbytes for extent in layout_of(case).extents.extents]


@pytest.mark.parametrize(
    ("durability", "state_format"), [("step", "fp32"), ("none", "fp32"), ("power", "int8_remainder")]
)
def test_what_is_saved_is_counted(tmp_path: Path, durability: str, state_format: str) -> None:
    """Every byte is counted as moved or as saved: reads with durability, reads and writes without."""
    case = Case(dtype=torch.bfloat16, durability=durability, state_format=state_format, tasklet_bytes=65_536)
    resident = sizes(case)[:2]
    with (
        running(tmp_path / "plain", case) as plain,
        running(tmp_path / "cached", case.but(cache_bytes=sum(resident))) as cached,
    ):
        for run in (plain, cached):
            run.steps(range(3))
            run.state()
        moved, saved = plain.handler.traffic(), cached.handler.traffic()
    assert (moved.cached_read_bytes, moved.cached_write_bytes) == (0, 0)
    assert saved.shared_read_bytes + saved.cached_read_bytes == moved.shared_read_bytes
    assert saved.shared_write_bytes + saved.cached_write_bytes == moved.shared_write_bytes
    assert saved.cached_read_bytes > 0
    assert (saved.cached_write_bytes > 0) == (durability == "none")
    if state_format == "fp32":
        # The first tasklet is all of parameter 1, which has no gradient at one step of three. Then all is read once.
        assert saved.cached_read_bytes == 3 * resident[0] + 4 * resident[1]
        # Those of the first state and of the three steps.
        assert saved.cached_write_bytes in (0, 3 * resident[0] + 4 * resident[1])


def test_resident_tasklets_are_never_read_again(tmp_path: Path) -> None:
    """With all state in memory a step reads nothing. Without durability it writes nothing and takes no space.

    A rollback reads the generation before, once.
    """
    for durability in ("step", "none"):
        case = Case(durability=durability, cache_bytes=EVERYTHING, num_devices=2)
        with running(tmp_path / durability, case) as run:
            assert run.handler.cache_bytes == sum(sizes(case))
            before = run.handler.traffic()
            run.steps(range(3))
            after = run.handler.traffic()
            assert after.read_calls == before.read_calls == 0
            assert (after.write_calls > before.write_calls) == (durability == "step")
            files = [folder / "default" / "rank-00000" / "state.bin" for folder in run.folders]
            assert (sum(file.stat().st_size for file in files) == 0) == (durability == "none")
            if durability == "step":
                run.handler.begin_step(run.collect(3))
                run.handler.finish()
                run.handler.roll_back()
                rolled_back = run.handler.traffic().read_calls
                assert rolled_back > 0
                run.step(3)
                assert run.handler.traffic().read_calls == rolled_back


@pytest.mark.parametrize("written_through", [True, False])
def test_whole_tasklets_from_the_first_on(written_through: bool) -> None:
    """The cache holds whole tasklets from the first on. Without write-through the files hold only the others."""
    case = Case(durability="step" if written_through else "none", num_devices=2)
    layout = layout_of(case)
    nbytes = [extent.nbytes for extent in layout.extents.extents]
    for given_bytes, count in ((0, 0), (nbytes[0] - 1, 0), (nbytes[0], 1), (sum(nbytes) - 1, len(nbytes) - 1)):
        cut = with_residents(layout, nbytes=given_bytes, written_through=written_through)
        assert cut.num_resident == count
        on_storage = nbytes if written_through else nbytes[count:]
        places = [cut.extents.num_places(device) for device in range(2)]
        places_per_tasklet = 2 if written_through else 1
        assert sum(places) == len(on_storage) * places_per_tasklet
        assert max(places) - min(places) <= places_per_tasklet
        assert cut.extents.place_bytes == max(on_storage)


def test_a_store_with_state_in_memory_is_not_recovered(tmp_path: Path) -> None:
    """A store with state only in memory is refused with the reason. The same store without a cache is recovered."""
    case = Case(durability="none")
    for cache_bytes in (0, sizes(case)[0]):
        run = Run(tmp_path / str(cache_bytes), case.but(cache_bytes=cache_bytes))
        run.step(1)
        run.close(remove=False)
    recover_store([tmp_path / "0" / "disk0"]).close(remove=True)
    with pytest.raises(StorageError, match="1 tasklets were in the memory") as caught:
        recover_store([tmp_path / str(sizes(case)[0]) / "disk0"])
    assert "checkpoint" in caught.value.remedy
