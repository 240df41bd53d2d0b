"""Translates values of ``smart-infinity simulate``'s command line for the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.native.formats import STATE_FORMATS

if TYPE_CHECKING:
    from lightning_smartinfinity.planning.simulator.hardware import Machine
    from lightning_smartinfinity.planning.simulator.step import StepTime
    from lightning_smartinfinity.planning.simulator.workload import Workload

__all__ = ["Case", "Simulated", "in_figures"]

_STEPS = {rule.name: rule.step for rule in RULES}
_ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_OURS = ("smartssd", "host")
_PARTS = ("forward", "backward", "update", "step")


def in_figures(parameters: int) -> str:
    """Return a number as on the command line: 8.4e9, 124e6, 1000."""
    for unit in (12, 9, 6):
        if parameters >= 10**unit:
            return f"{parameters / 10**unit:g}e{unit}"
    return str(parameters)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination of the command line's lists.

    Args:
        parameters: Parameters of the model.
        devices: Number of storage devices.
        system: System that runs the update.
        state: State format.
        ratio: Share of the gradient elements that is sent; ``None`` for all.
        overlap: ``"none"`` or ``"forward"``.
        optimizer: Optimizer whose state is updated.
        dtype: Type of this package's gradients and parameters; published systems use fp32.
        route: How gradients reach this package's accelerators.
        error_feedback: Whether this package keeps the residual of compression.
        gpu: Name of the GPU.
    """

    parameters: int
    devices: int
    system: str
    state: str
    ratio: float | None
    overlap: str
    optimizer: str
    dtype: str
    route: str
    error_feedback: bool
    gpu: str

    @property
    def is_possible(self) -> bool:
        """Whether the system supports the combination and, for this package's systems, trains with it."""
        compresses = self.system in ("smartssd", "su", "su+o")
        form = STATE_FORMATS[self.state]
        return (
            (form.in_place or self.system == "host" or (form.on_cards and self.system == "smartssd"))
            and form.step in (None, _STEPS[self.optimizer])
            and form.required_parameters in (None, self.dtype)
            and (self.ratio is None or compresses)
            and (self.overlap == "none" or self.system in _OURS)
        )

    @property
    def keeps_residual(self) -> bool:
        """Whether the case has a residual."""
        return self.system == "smartssd" and self.error_feedback and self.ratio is not None and self.ratio < 1

    def simulate(self, machine: Machine) -> Simulated:
        """Simulate a step on a machine."""
        from lightning_smartinfinity.planning.simulator.handler import Route
        from lightning_smartinfinity.planning.simulator.step import Overlap, System, simulate_step

        if not self.keeps_residual:
            machine = replace(machine, host=replace(machine.host, feed_back=0.0))
        time = simulate_step(
            machine, self._workload(), System(self.system), overlap=Overlap(self.overlap), route=Route(self.route)
        )
        return Simulated(self, time, self._host_bytes())

    def _host_bytes(self) -> dict[str, int]:
        from lightning_smartinfinity.planning.memory import host_bytes
        from lightning_smartinfinity.planning.simulator.handler import Route

        if self.system not in _OURS:
            return {}
        return host_bytes(
            self._workload(),
            arena_item_bytes=_ITEM_BYTES[self.dtype],
            num_cards=self.devices if self.system == "smartssd" else 0,
            route=Route(self.route),
            error_feedback=self.keeps_residual,
        )

    def _workload(self) -> Workload:
        from lightning_smartinfinity.planning.simulator.gradients import Dense, GradientForm, Pairs, TopKPayload
        from lightning_smartinfinity.planning.simulator.workload import NUM_ARRAYS, Workload

        item_bytes = _ITEM_BYTES[self.dtype] if self.system in _OURS else 4
        gradients: GradientForm = Dense(item_bytes)
        if self.ratio is not None:
            gradients = TopKPayload(self.ratio, item_bytes) if self.system in _OURS else Pairs(2 * self.ratio)
        return Workload(
            numel=self.parameters,
            gradients=gradients,
            num_arrays=NUM_ARRAYS[self.optimizer],
            parameter_bytes=item_bytes,
            state_format=self.state,
        )


@dataclass(frozen=True)
class Simulated:
    """A case with its simulated step.

    Args:
        case: The case.
        time: Seconds and traffic of the step.
        host_bytes: Host memory of this package's update in one process, in bytes by purpose; empty for other systems.
    """

    case: Case
    time: StepTime
    host_bytes: dict[str, int]

    @property
    def columns(self) -> dict[str, str]:
        """Columns of the table."""
        case = self.case
        return {
            "parameters": in_figures(case.parameters),
            "devices": str(case.devices),
            "system": case.system,
            "state": case.state,
            "gradients": "dense" if case.ratio is None else f"top {100 * case.ratio:g} %",
            "overlap": case.overlap,
        }

    @property
    def memory_columns(self) -> tuple[tuple[str, str], ...]:
        """Columns that affect memory."""
        return tuple((name, value) for name, value in self.columns.items() if name != "overlap")

    @property
    def series(self) -> str:
        """Name of the line in a plot: all values but the sizes."""
        columns = self.columns
        named = [columns["system"]]
        usual = {"state": "fp32", "gradients": "dense"}
        named += [columns[name] for name in usual if columns[name] != usual[name]]
        return ", ".join(named + [f"beside {columns['overlap']}"] * (columns["overlap"] != "none"))

    def as_json(self) -> dict[str, Any]:
        """Return the values for JSON, as docs/simulation.md lists them."""
        case, traffic = self.case, self.time.traffic
        ours, on_cards = case.system in _OURS, case.system == "smartssd"
        return {
            "parameters": case.parameters,
            "devices": case.devices,
            "system": case.system,
            "state_format": case.state,
            "ratio": case.ratio,
            "error_feedback": case.keeps_residual if on_cards and case.ratio is not None else None,
            "overlap": case.overlap,
            "optimizer": case.optimizer,
            "dtype": case.dtype if ours else "fp32",
            "gradient_route": case.route if on_cards else None,
            "gpu": case.gpu,
            "host_bytes": self.host_bytes,
            "seconds": {part: getattr(self.time, part) for part in _PARTS},
            "bytes_per_parameter": {
                name: getattr(traffic, name) / case.parameters
                for name in ("shared_down", "shared_up", "internal_read", "internal_write")
            },
        }
