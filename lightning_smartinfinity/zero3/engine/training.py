"""The DeepSpeed engine whose stage-3 optimizer keeps its state on storage."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import cast

# Imported first: otherwise DeepSpeed would import it while its base class is replaced (_configure_zero_optimizer).
import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401
import deepspeed.runtime.zero.stage3 as stage3
import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.utils import is_optimized_parameter

from lightning_smartinfinity.common.freed_memory import return_freed_memory
from lightning_smartinfinity.common.patches import replaced
from lightning_smartinfinity.common.transformers_models import describe_models
from lightning_smartinfinity.errors import CheckpointError, StorageError, UnsupportedError
from lightning_smartinfinity.settings.rules import shown
from lightning_smartinfinity.settings.strategy import check_save_path
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.zero3.checkpoints.folders.folder_swap import replacing, writing
from lightning_smartinfinity.zero3.checkpoints.folders.note import write_note
from lightning_smartinfinity.zero3.checkpoints.folders.staged_save import LATEST
from lightning_smartinfinity.zero3.checkpoints.formats import optimizer_state
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.client_state import GRADIENTS_LEFT_OUT, MODEL_KEY
from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import find_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import RANK_KEY, SAVE_ID
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorFile
from lightning_smartinfinity.zero3.checkpoints.formats.zero_folder import ZeroFolder
from lightning_smartinfinity.zero3.checkpoints.load.folder_check import check_checkpoint, check_same_save
from lightning_smartinfinity.zero3.checkpoints.load.resharding import load_resharded
from lightning_smartinfinity.zero3.checkpoints.save.background_saves import BackgroundSaves
from lightning_smartinfinity.zero3.checkpoints.save.checkpoint_engine import SmartInfinityCheckpointEngine
from lightning_smartinfinity.zero3.engine.portable import PortableEngine
from lightning_smartinfinity.zero3.optimizer.clipping import clip_norm
from lightning_smartinfinity.zero3.optimizer.release import release_module
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.parameters.callers import unanswered
from lightning_smartinfinity.zero3.parameters.foreign_errors import naming_partitions
from lightning_smartinfinity.zero3.parameters.gathering import engine_has_turn
from lightning_smartinfinity.zero3.parameters.module_guard import naming_late_parameters, refuse_late_parameters
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper, stored_parameter
from lightning_smartinfinity.zero3.parameters.status import engine_at_work
from lightning_smartinfinity.zero3.parameters.unrounded import keep_slice, unrounded_slice
from lightning_smartinfinity.zero3.ranks.collectives import background_group, raising_together
from lightning_smartinfinity.zero3.ranks.watchdog import naming_lost_rank
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup.activations import offloading
from lightning_smartinfinity.zero3.untyped import ClientState, SavedState, ZeroOptimizer, ZeroParameter

__all__ = ["SmartInfinityEngine"]


class SmartInfinityEngine(PortableEngine):
    """An engine that builds a :class:`StorageOptimizer`.

    Args:
        offload: Where optimizer state is stored and how it is transferred.
        model: The model, as ``deepspeed.initialize`` passes it to ``DeepSpeedEngine``.
        optimizer: The user's optimizer, passed in the same way.
        **kwargs: Further arguments, passed in the same way.

    Attributes:
        saves: The saves in progress in the background.
        resumed_from: Keys of the client state without which the training cannot resume.
    """

    optimizer: StorageOptimizer
    saves: BackgroundSaves
    resumed_from: frozenset[str] = frozenset()
    _global_grad_norm: float | None

    def __init__(
        self, *, offload: OffloadSettings, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **kwargs: object
    ) -> None:
        self._offload = offload
        self._groups = list(optimizer.param_groups)  # the base class removes empty groups
        try:
            super().__init__(model=model, optimizer=optimizer, **kwargs)
        except BaseException:
            # vars: torch's Module cannot look up attributes if its constructor has not run.
            built = vars(self).get("optimizer")
            if isinstance(built, StorageOptimizer):
                built.rank_state.close()
                built.destroy()
            release_module(model)
            raise

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer | None) -> ZeroOptimizer:
        # The base class imports the optimizer class from its module at call time.
        with replaced(
            stage3,
            "DeepSpeedZeroOptimizer_Stage3",
            partial(
                StorageOptimizer,
                offload=self._offload,
                groups=self._groups,
                describe=optimizer_state.state_dict,
                load=optimizer_state.load_state_dict,
            ),
        ):
            return super()._configure_zero_optimizer(optimizer)

    def _check_for_duplicates(self, optimizer: torch.optim.Optimizer) -> None:
        # The base class searches lists: with many parameters, its check takes longer than the rest of the set-up.
        counts = Counter(id(param) for group in optimizer.param_groups for param in group["params"])
        for name, param in self.module.named_parameters():
            if counts[id(param)] > 1:
                raise UnsupportedError(
                    f"Parameter {name!r} is given to the optimizer {counts[id(param)]} times.", "Give it once."
                )

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Run forward like the base class; offload activations to storage if the settings say so.

        Raises:
            RankLostError: Another rank is missing.
            UnsupportedError: A module that runs has a parameter added since the set-up (the step finds others); or
                activations are offloaded, and the module calls code of torch that refuses saved-tensor hooks.
        """
        activations = self.optimizer.rank_state.activations
        with ExitStack() as contexts:
            contexts.enter_context(naming_late_parameters(self.module))
            if activations is not None and torch.is_grad_enabled():
                # Parameters are excluded by their type: before they are gathered, they have no memory to identify them.
                contexts.enter_context(offloading(activations, inputs, kwargs, list(self.module.buffers())))
            return super().forward(*inputs, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **unknown: object
    ) -> torch.Tensor:
        """Run backward like the base class; the parameters of a retained graph stay gathered.

        Raises:
            UnsupportedError: The loss has no graph; a parameter was replaced within forward; or another argument of
                ``Tensor.backward``, such as ``create_graph``, was passed.
            RankLostError: Another rank is missing.
        """
        if not loss.requires_grad:
            raise UnsupportedError(
                f"The loss {shown(loss)} has no graph: it was detached, computed under no_grad, or does not depend "
                "on a trained parameter.",
                "Compute it from the module's outputs, with gradients.",
            )
        if unknown:
            raise UnsupportedError(
                f"backward({', '.join(sorted(unknown))}=...) does not work with the smart_infinity strategy: gradients "
                "of parameters leave for the gradient arena at once.",
                "Compute gradients of gradients by torch.autograd.grad(..., create_graph=True) within the loss.",
            )
        self._global_grad_norm = None  # until the step sets it
        with naming_lost_rank(), engine_has_turn():
            self.optimizer.backward_begins(retain_graph=retain_graph)
            # Backward runs checkpointed parts of forward again, so it needs forward's contexts, too.
            with (
                self.optimizer.in_backward(),
                engine_at_work(),
                self._mending_gathers(),
                self._linear_of_partitions(),
                naming_partitions(),
                naming_late_parameters(self.module),
            ):
                scaled: torch.Tensor = super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        return scaled

    def step(self, *args: object, **kwargs: object) -> None:
        """Take a step like the base class.

        Raises:
            RankLostError: Another rank is missing.
            UnsupportedError: A parameter was added since the set-up.
        """
        refuse_late_parameters(self.module)
        with naming_lost_rank(), engine_has_turn():
            super().step(*args, **kwargs)

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the gradients that wait for a step, or else of the last step's. Collective."""
        return clip_norm(self.optimizer, math.inf) if self._global_grad_norm is None else self._global_grad_norm

    def zero_grad(self) -> None:
        """Discard the gradients, which the base class would not find."""
        self.optimizer.zero_grad_as_torch(set_to_none=True)

    # ---- parameters that are not trained, which are outside the optimizer's partition

    def _get_param_fragment_func(self, param: ZeroParameter) -> torch.Tensor:
        if stored_parameter(param) is None:
            fragment: torch.Tensor = super()._get_param_fragment_func(param)
        else:
            swapper: ParameterSwapper = param.nvme_swapper
            fragment = swapper.read_partition(param)
        return unrounded_slice(param, fragment)

    def module_state_dict(self, *args: object, **kwargs: object) -> dict[str, torch.Tensor]:
        """Return the base class's state dict: buffers, and empty parameters even if modules override ``state_dict``."""
        with unanswered():
            states: dict[str, torch.Tensor] = super().module_state_dict(*args, **kwargs)
        return states

    def load_module_state_dict(self, checkpoint: SavedState, *args: object, **kwargs: object) -> None:
        """Load like the base class, also into partitions on storage and into fp32 values of 16-bit parameters."""
        fragments = checkpoint.get(FROZEN_PARAM_FRAGMENTS)
        with unanswered():
            super().load_module_state_dict({**checkpoint, FROZEN_PARAM_FRAGMENTS: None}, *args, **kwargs)
        if fragments is None:
            return
        for param in cast(Iterator[ZeroParameter], self.module.parameters()):
            if is_optimized_parameter(param):
                continue
            values = fragments[self.param_names[param]]
            if stored_parameter(param) is None:
                param.ds_tensor.data.copy_(values)
            else:
                swapper: ParameterSwapper = param.nvme_swapper
                swapper.write_partition(param, values)
            keep_slice(param, values)

    # ---- checkpoints

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]:
        names = super()._get_all_ckpt_names
        found: list[str] = limited("Reading", checkpoints_path, names, checkpoints_path, tag)
        return found

    def _get_all_zero_checkpoint_names(self, load_dir: str, tag: str, bf16_mode: bool) -> list[str]:
        names = super()._get_all_zero_checkpoint_names
        found: list[str] = limited("Reading", load_dir, names, load_dir, tag, bf16_mode)
        return found

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        self.checkpoint_engine = SmartInfinityCheckpointEngine(self._config, optimizer=self.optimizer)
        self.saves = BackgroundSaves(self.optimizer, self._offload)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: ClientState = {},  # noqa: B006  (the base class's signature)
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save like the base class; an earlier save under this tag stays whole until the new one is complete.

        If ``saves.wanted``, the optimizer's arrays may be written after this returns; the save is put in place after
        that.

        Raises:
            CheckpointError: This checkpoint, or an earlier one in progress, could not be written; raised on every rank.
        """
        check_save_path(save_dir)
        tag = str(tag if tag is not None else f"global_step{self.global_steps}")
        return_freed_memory()  # memory kept for the next step on a CPU: the save needs its own
        with io_limit(self._offload.transfer.io_timeout), ExitStack() as save:
            pinned = self.saves.begin(save_dir, save)
            save.enter_context(self._noting(save_dir, client_state))  # after begin, which may leave these contexts
            group = background_group() if pinned is not None else None
            staging = save.enter_context(replacing(save_dir, tag, closing_group=group))
            self.saves.note_leader(save_dir, leads=staging.leads)
            # Every file of one save contains its id, so that a mixture of two saves is recognised.
            self.optimizer.save_id = staging.save_id
            named: ClientState = {
                SAVE_ID: staging.save_id,
                RANK_KEY: self.global_rank,
                MODEL_KEY: describe_models(self.module),
            }
            if self.optimizer.rank_state.has_gradients:
                named[GRADIENTS_LEFT_OUT] = True
            left_open: list[TensorFile] = []
            with ExitStack() as contexts:
                if pinned is not None:
                    contexts.enter_context(self.checkpoint_engine.leaving_arrays(left_open, save))
                saved: bool = super().save_checkpoint(
                    str(staging.folder), tag, {**client_state, **named}, False, exclude_frozen_parameters
                )
            with raising_together(), writing(save_dir):
                if staging.leads:
                    latest = tag if save_latest else None
                    folder, write = staging.folder, self._write_beside
                    limited("Writing", folder, write, folder, latest, client_state, path=save_dir)
            if pinned is not None:
                self.saves.complete(save, save_dir, left_open[0], pinned)
        self.optimizer.rank_state.keeping.saved = True
        if self.global_rank == 0 and not self.resumed_from:  # else Lightning's Trainer, whose fit knows the batches
            self.optimizer.rank_state.warn_of_gradients_left_out(save_dir)
        if self.optimizer.update.lost is not None and self.global_rank == 0:
            warnings.warn(
                f"The checkpoint {save_dir} does not have the last step that was counted before: its update failed "
                f"when the loop had gone on, and was rolled back ({self.optimizer.update.lost}). To repeat that step, "
                "resume from storage or from an earlier checkpoint instead.",
                stacklevel=2,
            )
        return saved

    @contextmanager
    def _noting(self, path: str | Path, saved: Collection[str]) -> Iterator[None]:
        """Note a checkpoint to resume from on storage if this context ends well, for when a storage folder is lost."""
        step, resumable = self.global_steps, not self.optimizer.saves_weights_only and self.resumed_from <= set(saved)
        yield
        if resumable:
            with suppress(StorageError):  # the checkpoint itself is whole
                self.optimizer.rank_state.handler.note_checkpoint(os.path.abspath(path), step=step)

    def _copy_recovery_script(self, save_path: str) -> None:
        # The base class calls this on rank zero only; if it raised there, the other ranks would wait. _write_beside
        # copies the scripts instead.
        pass

    def _write_beside(self, folder: Path, latest: str | None, saved: Collection[str], *, path: str | Path) -> None:
        """Write the files that every save has next to the subfolder, with DeepSpeed's names."""
        super()._copy_recovery_script(str(folder))
        if latest is not None:
            (folder / LATEST).write_text(latest)
        write_note(folder, saved, path=path)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        *args: object,
        needed: Collection[str] = (),
        **kwargs: object,
    ) -> tuple[str, ClientState]:
        """Load like the base class, after every rank has checked the folder. Any number of processes may have saved it.

        Args:
            load_dir: The folder that :meth:`save_checkpoint` wrote.
            tag: The subfolder; None: the one that ``latest`` names.
            load_module_strict: Whether the names of parameters and buffers must match.
            load_optimizer_states: Whether to also load optimizer state other than masters.
            load_lr_scheduler_states: Whether to also load the engine's scheduler.
            *args: Further arguments of the base class.
            needed: Keys of the client state that the checkpoint must have.
            **kwargs: Further arguments of the base class.

        Returns:
            The path of the checkpoint, and the client state that was saved with the model.

        Raises:
            CheckpointError: There is no checkpoint, it is damaged, or it belongs to another model; raised on every
                rank.
        """
        self.saves.finish()
        path = load_dir if tag is None else Path(load_dir) / tag
        found = find_checkpoint(path, bf16=self.bfloat16_enabled(), latest=True)
        folder = found.folder
        if not found.is_of_as_many:
            _refuse_parts(folder, load_optimizer_states, *args, *kwargs.values())
            saved = ZeroFolder.of(found)
            client_state = load_resharded(self, saved, strict=load_module_strict, needed=needed)
            if load_lr_scheduler_states and self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(saved.model_states["lr_scheduler"])
            return str(folder), client_state
        check_checkpoint(found, engine=self, strict=load_module_strict, needed=needed)
        with reading_checkpoint(path):
            loaded, client_state = super().load_checkpoint(
                str(folder.parent),
                folder.name,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                *args,
                **kwargs,
            )
        check_same_save(self.optimizer.save_id, client_state)
        return loaded, client_state

    # ---- accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Announce whether a step follows the next backward; if so, its update may begin within that backward."""
        super().set_gradient_accumulation_boundary(is_boundary)
        self.optimizer.step_follows = is_boundary

    # ---- refused

    def offload_states(self, *args: object, **kwargs: object) -> None:
        """Raise UnsupportedError: there is no optimizer state in memory to move."""
        raise UnsupportedError(
            "DeepSpeedEngine.offload_states does not work with the smart_infinity strategy.",
            "Remove the call: optimizer state is on storage already.",
        )


def _refuse_parts(folder: Path, load_optimizer_states: bool, *others: object) -> None:
    """Refuse arguments that load only a part of a checkpoint, which another number of processes saved."""
    if not load_optimizer_states or any(others):
        raise CheckpointError(
            f"{folder} was saved by another number of processes, and load_checkpoint was asked for a part of it.",
            "Leave load_optimizer_states, load_module_only and custom_load_fn as they are, or run on as many processes "
            "as saved it.",
        )
