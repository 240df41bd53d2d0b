"""Does something on two machines: ``python -m tests.nodes.node_worker DOING SCRATCH MACHINES OPTIONS``.

All see ``SCRATCH/shared``, and each has a disk of its own at ``SCRATCH/local``. MACHINES are ``true``, ``one`` (all
processes are on it) or ``made up``: each is then a process, or several, that remembers failed look-ups below the former
and, with own mounts, sees ``SCRATCH/node-<rank>`` as the latter. OPTIONS are those of the strategy, as JSON, and
``num_saves`` for what saves again and again, and ``storage`` for a storage folder below SCRATCH. What rank r found is
in ``SCRATCH/found-<r>.json``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import sleep  # real time, also where look-ups are remembered
from types import SimpleNamespace
from typing import Any

import deepspeed
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smartinfinity import (
    CheckpointError,
    SmartInfinityStrategy,
    StorageFullError,
    TransferConfig,
)
from lightning_smartinfinity.common.progress import showing_progress
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from lightning_smartinfinity.zero3.checkpoints.folders import folder_swap
from lightning_smartinfinity.zero3.checkpoints.folders.folder_swap import remove_interrupted, replacing
from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import find_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.scrub import scrub_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.universal_conversion import convert_checkpoint
from lightning_smartinfinity.zero3.ranks.file_systems import places_of
from tests.helpers.interrupted_runs import state_digest
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.nodes import RememberedLookups, become_node, mount_own
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import LIMIT, await_that
from tests.training.actions import does

TAG = "checkpoint"
NUM_MACHINES = 1 if sys.argv[3] == "one" else 2
PER_NODE = int(os.environ["WORLD_SIZE"]) // NUM_MACHINES
OPTIONS: dict[str, Any] = json.loads(sys.argv[4])
NUM_SAVES: int = OPTIONS.pop("num_saves", 0)
STORAGE: str | None = OPTIONS.pop("storage", None)
TRAININGS = ("space", "saves", "universal", "missing", "shared", "local", "remembering")
RECIPE = Recipe(odd=True, frozen=True, validate=True, epoch_batches=2, max_steps=6)


def places(scratch: Path) -> Any:
    rank = dist.get_rank()
    named = {"shared": scratch / "shared/new", "local": scratch / "local/a", "other": scratch / f"shared/of-{rank}/b"}
    each = [list(place)[:4] for place in places_of(list(named.values()))]
    by_device = [list(place)[:4] for place in places_of(list(named.values()), by_device=True)]
    return {**dict(zip(named, each, strict=True)), "by_device": by_device}


def links(scratch: Path) -> Any:
    """Save three times by a link that leads to another mount point on each machine."""
    own = scratch / f"mounted-{dist.get_rank()}"
    own.mkdir()
    mount_own(scratch / "shared", own)
    (scratch / "local" / "scratch").symlink_to(own)
    return [save(scratch / "local" / "scratch" / "a.ckpt", str(number)) for number in range(3)]


def space(scratch: Path) -> Any:
    """Ask for space on a file system that both see; return the error."""
    storage = scratch / "shared" / f"storage-{os.environ['RANK']}"
    strategy = SmartInfinityStrategy(storage, transfer=TransferConfig(keep=False))
    needs = sum(param.numel() for param in RECIPE.build_model().parameters()) * 12 * 2
    free = os.statvfs
    os.statvfs = lambda path: SimpleNamespace(f_bavail=needs, f_frsize=1) if "shared" in str(path) else free(path)
    try:
        quiet_trainer(scratch, strategy, num_nodes=2).fit(LitTiny(RECIPE))
    except StorageFullError as error:
        return str(error)


def swaps(scratch: Path) -> Any:
    """Save again and again to paths that every rank has looked for before; return what lies there."""
    found = []
    for number in range(NUM_SAVES):
        path = scratch / "shared" / f"{number % 4}.ckpt"
        path.exists()
        (path / ".saving").exists()
        dist.barrier()
        # The leader is done before the other machine has written anything.
        found.append(save(path, str(number), pause=0.1 * dist.get_rank()))
        dist.barrier()
    return found


def save(path: Path, content: str, *, pause: float = 0.0) -> bool:
    """Save what :func:`loaded` reads, after a pause; return whether this rank leads."""
    rank = dist.get_rank()
    with replacing(path, TAG) as staging:
        sleep(pause)
        (staging.folder / TAG).mkdir(exist_ok=True)
        for kind in ("model", "optim"):
            (staging.folder / TAG / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt").write_text(content)
        if staging.leads:
            (staging.folder / "latest").write_text(TAG)
    return staging.leads


def leftovers(scratch: Path) -> Any:
    """Look for what a killed save has left of a path; return whether a rank then sees at once what is made there."""
    path = scratch / "shared" / "a.ckpt"
    save(path, "0")
    time.sleep(0.4)  # long enough to forget that there was no checkpoint, as time passes here
    assert path.exists()
    remove_interrupted(path, TAG)
    if dist.get_rank() == 0:
        (path / ".saving").mkdir()
    dist.barrier()
    return (path / ".saving").exists()


def loaded(path: Path) -> str:
    """Return what this rank would load, and check that nothing is left beside it."""
    found = find_checkpoint(path, bf16=False, latest=True)
    (own,) = found.folder.glob(f"zero_pp_rank_{dist.get_rank()}_*_optim_states.pt")
    assert sorted(os.listdir(path)) == [TAG, "latest"]
    return own.read_text()


def swap_on_one(first: int, other: Callable[[], None], scratch: Path) -> None:
    """Let one machine swap its part of a save, and the other one do something else when that is done."""
    done, put = scratch / f"swapped-{first}", folder_swap.put_save_in_place

    def put_first(*arguments: Any) -> None:
        put(*arguments)
        done.touch()

    def put_later(*_: Any) -> None:
        await_that(done.exists, seconds=LIMIT)
        done.unlink()
        other()

    folder_swap.put_save_in_place = put_first if dist.get_rank() == first else put_later


def killed(scratch: Path, first: int) -> Any:
    """Be killed when the first machine has swapped its part of the second save."""
    save(scratch / "local" / "a.ckpt", "old")
    swap_on_one(first, lambda: os.kill(os.getpid(), signal.SIGKILL), scratch)
    save(scratch / "local" / "a.ckpt", "new")


def load(scratch: Path) -> Any:
    return loaded(scratch / "local" / "a.ckpt")


def divided(scratch: Path) -> Any:
    """Leave parts of two saves in several ways; return what is loaded then."""
    return {f"{case} {first}": _divided(scratch, case, first) for case in DIVIDED for first in range(2)}


DIVIDED = ("the new one is not whole", "none is whole")


def _divided(scratch: Path, case: str, first: int) -> str:
    path, put = scratch / "local" / f"{case}-{first}.ckpt", folder_swap.put_save_in_place

    def fail() -> None:
        raise OSError("the disk is gone")

    save(path, "old")
    swap_on_one(first, fail, scratch)
    with suppress(CheckpointError):
        save(path, "new")
    folder_swap.put_save_in_place = put
    if case == "none is whole" or dist.get_rank() != first:
        _remove(path / ".saving")
    try:
        return loaded(path)
    except CheckpointError as error:
        assert sorted(os.listdir(path)) == [TAG, "latest"]
        return str(error)


def fit(scratch: Path, folder: Path, *, resume: str | None = None, max_steps: int = 6) -> dict[str, Any]:
    """Train with a ModelCheckpoint that keeps one checkpoint and links the last; return what came of it."""
    last = ModelCheckpoint(folder, save_top_k=1, save_last="link", every_n_train_steps=2, filename="{step}")
    trainer = _trainer(scratch, max_steps=max_steps, callbacks=[last])
    module = LitTiny(RECIPE)
    trainer.fit(module, ckpt_path=resume)
    ends = {"weights": weights_digest(module), "state": state_digest(trainer.strategy._training_optimizer, module)}
    dist.barrier()
    there = sorted(str(path.relative_to(folder)) for path in folder.glob("*"))
    tested = _trainer(scratch, max_steps=max_steps)
    validated = tested.validate(LitTiny(RECIPE), ckpt_path=str(folder / "last.ckpt"), verbose=False)
    return {"losses": module.losses, "there": there, "validated": validated, "epochs": module.validated, **ends}


def weights_digest(module: torch.nn.Module) -> str:
    """Return a digest of all weights of all ranks."""
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        weights = [param.detach().float().cpu().numpy().tobytes() for param in module.parameters()]
    return hashlib.sha256(b"".join(weights)).hexdigest()


def _trainer(scratch: Path, **settings: Any) -> pl.Trainer:
    storage = scratch / (STORAGE or ("storage" if NUM_MACHINES == 1 else f"storage-{os.environ['RANK']}"))
    strategy = SmartInfinityStrategy(storage, transfer=TransferConfig(keep=False), **OPTIONS)
    return quiet_trainer(
        scratch,
        strategy,
        devices=PER_NODE,
        num_nodes=NUM_MACHINES,
        enable_checkpointing=True,
        **settings,
    )


def fits(scratch: Path, where: str) -> Any:
    folder = scratch / where
    whole = fit(scratch, folder / "whole")
    if NUM_MACHINES == 1:  # what the resumed one has to equal, too
        return {"whole": whole}
    fit(scratch, folder / "resumed", max_steps=4)
    resumed = fit(scratch, folder / "resumed", resume=str(folder / "resumed" / "step=4.ckpt"))
    return {"whole": whole, "resumed": resumed}


def remembering(scratch: Path) -> Any:
    """Train, resume, export, and save again and again to the same paths, where each machine has a mount of its own."""
    found, folder = fits(scratch, "local"), scratch / "local"
    module = LitTiny(RECIPE)
    trainer = _trainer(scratch, max_steps=2)
    trainer.fit(module)
    for number in range(NUM_SAVES):
        content = str(number) * (number + 1)
        save(folder / f"{number % 2}.ckpt", content)
        dist.barrier()
        assert loaded(folder / f"{number % 2}.ckpt") == content
        trainer.strategy.save_pretrained(folder / "exported")  # type: ignore[attr-defined]
        assert (folder / "exported" / "model.safetensors").stat().st_size
    make_by_turns(folder / "resumed" / "step=4.ckpt", folder / "made")
    by_two_paths = scratch / f"node-{dist.get_rank()}" / "2.ckpt"
    assert save(by_two_paths, "2") == (dist.get_rank() == 0)
    dist.barrier()
    assert loaded(by_two_paths) == "2"
    return found


def make_by_turns(checkpoint: Path, made: Path) -> None:
    """Convert and export to paths that each machine has just seen before the other one removed them."""
    for make in (
        convert_checkpoint,
        lambda checkpoint, made: export_checkpoint(checkpoint, made, ExportSettings()),
        lambda checkpoint, made: export_checkpoint(checkpoint, made, ExportSettings(to="lightning")),
    ):
        for rank in range(2):
            if rank == dist.get_rank():
                make(checkpoint, made)
            dist.barrier()
            assert made.is_file() or any(made.iterdir())
            dist.barrier()
            if rank == dist.get_rank():
                _remove(made)
            dist.barrier()


def step_of(path: Path) -> Any:
    """Return the step that both ranks have saved in a checkpoint, or what is wrong with it."""
    scrubbed = scrub_checkpoint(path, show=functools.partial(showing_progress, shown=False))
    if scrubbed.damaged or scrubbed.unknown:
        return [*scrubbed.damaged, *scrubbed.unknown]
    files = sorted(path.glob("checkpoint/zero_pp_rank_*_model_states.pt"))
    (step,) = {torch.load(file, weights_only=False)["global_step"] for file in files}
    return step


def saves(scratch: Path) -> Any:
    """Save after every step, by a callback that keeps the newest two and over three other paths.

    Returns:
        For each step the names of what lies there, seen where no look-up is remembered, each with the step that is
        saved in it, or what is wrong with it.
    """
    folder, found = scratch / "shared" / "saves", []

    def save_and_look(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step:
            trainer.save_checkpoint(folder / f"over-{trainer.global_step % 3}.ckpt")
            dist.barrier()
            found.append({path.name: step_of(path) for path in sorted((scratch / "filer" / "saves").iterdir())})
            dist.barrier()

    looking = does(on_train_batch_start=save_and_look, on_train_end=save_and_look)
    newest = {"monitor": "step", "mode": "max", "save_top_k": 2, "save_last": True}
    kept = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, **newest)  # type: ignore[arg-type]
    _trainer(scratch, max_steps=NUM_SAVES, callbacks=[looking, kept]).fit(LitTiny(Recipe()))
    return found


def universal(scratch: Path) -> Any:
    """Resume from a universal checkpoint that the other machine has looked for before it was made."""
    ordinary, made = scratch / "shared" / "ordinary.ckpt", scratch / "shared" / "universal"
    trainer = _trainer(scratch, max_steps=2)
    trainer.fit(LitTiny(RECIPE))
    trainer.save_checkpoint(ordinary)
    assert not made.exists()
    dist.barrier()
    if dist.get_rank() == 0:
        convert_checkpoint(ordinary, made)
    dist.barrier()
    module = LitTiny(RECIPE)
    _trainer(scratch, max_steps=4).fit(module, ckpt_path=str(made))
    return len(module.losses)


def missing(scratch: Path) -> Any:
    """Resume where the second machine has lost its part, and where it has no part at all."""
    folder, errors = scratch / "local", []
    fit(scratch, folder, max_steps=2)
    rank = int(os.environ["RANK"])
    for number, pattern in enumerate((f"*/*zero_pp_rank_{rank}_*", "*")):
        if rank == 1:
            for path in (folder / "step=2.ckpt").glob(pattern):
                _remove(path)
        dist.barrier()
        try:
            _trainer(scratch, max_steps=4).fit(LitTiny(RECIPE), ckpt_path=str(folder / "step=2.ckpt"))
        except CheckpointError as error:
            errors.append(str(error))
        assert len(errors) == number + 1
    return errors


def _remove(path: Path) -> None:
    if path.is_dir():
        for each in path.iterdir():
            _remove(each)
        path.rmdir()
    else:
        path.unlink()


def main() -> None:
    doing, scratch, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
    if sys.argv[3] == "made up":
        node, local_rank = divmod(rank, PER_NODE)
        become_node(node, scratch=scratch, local_rank=local_rank)
        with suppress(FileNotFoundError):
            mount_own(scratch / f"node-{node}", scratch / "local")
        RememberedLookups(scratch / "shared", seconds=30)
    actions: dict[str, Callable[[Path], Any]] = {
        **{action.__name__: action for action in (places, space, swaps, leftovers, saves, links, universal, missing)},
        **{action.__name__: action for action in (divided, load, remembering)},
        **{where: functools.partial(fits, where=where) for where in ("shared", "local")},
        **{f"killed-{first}": functools.partial(killed, first=first) for first in range(2)},
    }
    if doing not in TRAININGS:
        dist.init_process_group("gloo")
    found = actions[doing](scratch)
    (scratch / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
