"""The training in a plan: batch, precision, and this package's settings that change memory or time."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.native.formats import STATE_FORMATS, serves
from lightning_smartinfinity.planning.simulator.gradients import BlockScaledPayload, GradientForm, TopKPayload
from lightning_smartinfinity.planning.simulator.workload import NUM_ARRAYS
from lightning_smartinfinity.settings import HOST_TASKLET_BYTES, TransferConfig
from lightning_smartinfinity.settings.rules import (
    FLAG,
    between,
    in_seconds,
    number,
    one_of,
    optional,
    positive,
    require,
)

__all__ = ["BLOCK_SCALED", "BUILDS", "OFFLOADS", "OPTIMIZERS", "PRECISIONS", "Training"]

PRECISIONS = ("bf16-mixed", "bf16-true", "16-mixed", "16-true", "32-true")
"""Precisions of the strategy."""

OFFLOADS = ("none", "cpu", "nvme")
"""Place of parameters between their uses: the GPU (or host memory without one), host memory, storage."""

BUILDS = ("init", "configure_model")
"""Methods of the module that may build the model."""

OPTIMIZERS = {optimizer: rule.name for rule in RULES for optimizer in rule.optimizers}
"""Name of the update rule, by class name of torch.optim."""

BLOCK_SCALED = "BlockScaled"
"""Compression that sends all gradients in 8 bits."""

_MOST = 10**9
_LEAST_INTERVAL = 1e-3


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training to plan.

    Args:
        batch: Sequences of a micro-batch, per process.
        seq: Tokens of a sequence.
        accumulate: Micro-batches per step.
        checkpointing: Whether activations are recomputed in backward.
        precision: Precision of the Trainer.
        optimizer: Class name of the torch optimizer.
        state_format: Format of optimizer state on storage.
        offload_param: Place of parameters between their uses; one of :data:`OFFLOADS`.
        pin_memory: Whether the partitions that DeepSpeed keeps in host memory are pinned, each by itself. With a GPU
            DeepSpeed pins those of trained parameters in any case, together.
        build: Method that builds the model: ``"init"`` (all at once in fp32), or ``"configure_model"``, where each
            parameter is partitioned as soon as it is created.
        built_itemsize: Bytes per element of the model as it is built; None means that the precision determines them.
        processes: Number of processes on each machine.
        nodes: Number of machines.
        save_top_k: Number of checkpoints that are kept.
        tokens: Tokens of the whole training; None if unknown.
        asynchronous: Whether checkpoints are saved while training continues.
        gradient_budget: Bytes of gradients that each process holds in memory; the others are on storage. None: all are
            in memory.
        parameter_budget: Bytes of parameters that each process holds in memory at once if parameters are on storage.
            None: DeepSpeed's defaults.
        cache_bytes: Bytes of optimizer state that each process keeps in host memory.
        interval: Optimizer steps (int) or seconds (float) between two writes of that state to storage
            (``TransferConfig.interval``). None: it is written in every step.
        bucket_numel: Elements of the bucket in which gradients are reduced.
        accumulate_in: Dtype in which gradients of several micro-batches are added: ``"fp32"`` or the ``"parameters"``'.
        num_buffers: Number of ring buffers.
        tasklet_bytes: Bytes of the largest tasklet.
        places: Places of each tasklet's state on storage; 1 with ``durability="none"``.
        compression: Share of the gradients that ``TopK`` sends, or :data:`BLOCK_SCALED`; None: no compression.
        error_feedback: Whether the gradients' part that compression leaves out is kept for the next step.

    Raises:
        ConfigError: A value is out of range, or values contradict each other.
    """

    batch: int = 1
    seq: int = 512
    accumulate: int = 1
    checkpointing: bool = False
    precision: str = "bf16-mixed"
    optimizer: str = "AdamW"
    state_format: str = "fp32"
    offload_param: str = "none"
    pin_memory: bool = False
    build: str = "init"
    built_itemsize: int | None = None
    processes: int = 1
    nodes: int = 1
    save_top_k: int = 1
    tokens: int | None = None
    asynchronous: bool = True
    gradient_budget: int | None = None
    parameter_budget: int | None = None
    cache_bytes: int = 0
    interval: int | float | None = in_seconds(TransferConfig.persist_every)
    bucket_numel: int = 16 * 1024 * 1024
    accumulate_in: str = "fp32"
    num_buffers: int = 16
    tasklet_bytes: int = HOST_TASKLET_BYTES
    places: int = 2
    compression: float | str | None = None
    error_feedback: bool = True

    def __post_init__(self) -> None:
        some = between(1, _MOST)
        require(
            self,
            batch=some,
            seq=some,
            accumulate=some,
            checkpointing=FLAG,
            precision=one_of(*PRECISIONS),
            optimizer=one_of(*OPTIMIZERS),
            state_format=one_of(*STATE_FORMATS),
            offload_param=one_of(*OFFLOADS),
            pin_memory=FLAG,
            build=one_of(*BUILDS),
            built_itemsize=optional(between(1, 8)),
            processes=between(1, 1024),
            nodes=between(1, 10_000),
            save_top_k=between(0, _MOST),
            tokens=optional(between(1)),
            asynchronous=FLAG,
            gradient_budget=optional(between(0)),
            parameter_budget=optional(between(1)),
            cache_bytes=between(0),
            interval=optional(number(_LEAST_INTERVAL, _MOST)),
            bucket_numel=between(1),
            accumulate_in=one_of("fp32", "parameters"),
            places=between(1, 2),
            compression=optional(optional(positive(1), BLOCK_SCALED)),
            error_feedback=FLAG,
        )
        if self.gradient_budget is not None and self.compression is not None:
            raise ConfigError(
                "Compressed gradients are all in memory.", "Leave out the budget of gradients or the compression."
            )
        if self.parameter_budget is not None and self.offload_param != "nvme":
            raise ConfigError(
                "A budget of parameters is for parameters on storage.",
                "Use offload_param='nvme', or leave the budget of parameters out.",
            )
        form = STATE_FORMATS[self.state_format]
        if form.required_parameters == "bf16" and not self.precision.startswith("bf16"):
            raise ConfigError(
                f"state_format={self.state_format!r} needs parameters in bf16, not precision={self.precision!r}.",
                "Use precision='bf16-mixed' or another state format.",
            )
        if not serves(form, self.optimizer):
            raise ConfigError(
                f"state_format={self.state_format!r} does not exist for {self.optimizer}.", "Use state_format='fp32'."
            )

    def suits(self, state_format: str) -> bool:
        """Return whether a state format supports the training's optimizer and precision."""
        form = STATE_FORMATS[state_format]
        in_bf16 = self.precision.startswith("bf16")
        return serves(form, self.optimizer) and (in_bf16 or form.required_parameters != "bf16")

    @property
    def num_arrays(self) -> int:
        """Arrays of the optimizer's state, including the master."""
        return NUM_ARRAYS[OPTIMIZERS[self.optimizer]]

    @property
    def writes_back(self) -> bool:
        """Whether state in host memory is written to storage at an interval; the other state then has a third place."""
        return self.cache_bytes > 0 and self.interval is not None and self.places > 1

    @property
    def saves_beside(self) -> bool:
        """Whether state gets a third place on storage for saves while training continues, and has none otherwise."""
        # With a residual, training waits for saves.
        saves = self.asynchronous and self.places > 1 and self.save_top_k > 0 and not self.keeps_residual
        return saves and not self.writes_back

    @property
    def item_bytes(self) -> int:
        """Bytes per element of parameters."""
        return 4 if self.precision.startswith("32") else 2

    @property
    def gradient_itemsize(self) -> int:
        """Bytes per element of gradients: 4 if several micro-batches are added in fp32, else those of parameters."""
        return 4 if self.accumulate > 1 and self.accumulate_in == "fp32" else self.item_bytes

    @property
    def keeps_residual(self) -> bool:
        """Whether there is a residual: gradients not sent, kept for the next step, and on storage for resuming."""
        return self.compression not in (None, 1) and self.error_feedback

    @property
    def payload(self) -> GradientForm | None:
        """Form of the compressed gradients; None without compression."""
        if isinstance(self.compression, str):
            return BlockScaledPayload()
        return None if self.compression is None else TopKPayload(self.compression, self.gradient_itemsize)

    @property
    def built_bytes(self) -> int:
        """Bytes per element of the model as the module builds it; mixed precisions build it in fp32."""
        if self.built_itemsize is not None:
            return self.built_itemsize
        return self.item_bytes if self.precision.endswith("true") else 4

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step of all processes."""
        return self.batch * self.seq * self.accumulate * self.world_size

    @property
    def world_size(self) -> int:
        """Processes of all machines."""
        return self.processes * self.nodes
