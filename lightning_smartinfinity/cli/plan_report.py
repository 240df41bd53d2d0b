"""Prints the findings of ``smart-infinity plan``: as text, as a table of several models, or as values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_smartinfinity.cli.plan_recipe import python_recipe, yaml_recipe
from lightning_smartinfinity.planning.automatic import default_cache
from lightning_smartinfinity.planning.needs import MemoryKind, Need
from lightning_smartinfinity.planning.needs_table import in_gb, needs_table, what_breaks, what_is_tight

if TYPE_CHECKING:
    from lightning_smartinfinity.planning.choice import Alternative, Plan, Resources
    from lightning_smartinfinity.planning.model import ModelFigures
    from lightning_smartinfinity.planning.pace import Pace, Range
    from lightning_smartinfinity.planning.training import Training

__all__ = ["Findings", "as_json", "print_report", "print_table"]

_GIGA, _TERA = 1e9, 1e12
_FOLLOWING = ("cache_bytes", "interval")
_PARTS = ("forward", "backward", "parameters", "gradients", "network", "update", "step")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All findings about one model.

    Args:
        model: The model's sizes.
        resources: The machine's resources.
        asked: Plan of the training as requested.
        best: The fastest plan that fits; if none fits, the plan with the least shortage.
        alternatives: Ways to train without storage.
        drives: Number of drives that share the state.
        tbw: Terabytes that the drives may write.
        tbw_given: Whether the user gave ``tbw``; otherwise it is assumed.
        storage: The storage folder.
        found_here: Resources that were looked up on this machine, in words.
    """

    model: ModelFigures
    resources: Resources
    asked: Plan
    best: Plan
    alternatives: Sequence[Alternative]
    drives: int
    tbw: float
    tbw_given: bool
    storage: Path
    found_here: Sequence[str]


def print_report(found: Findings) -> None:
    """Print the findings about one model as text."""
    for line in _report(found):
        print(line)


def _report(found: Findings) -> Iterator[str]:
    model, training = found.model, found.asked.training
    yield f"{model.name}: {_count(model.numel)} parameters, {_count(model.trained_numel)} of them trained"
    if model.assumed:
        yield f"Assumed: {model.assumed}"
    yield (
        f"{training.batch} x {training.seq} tokens, {training.accumulate} micro-batch(es) a step,"
        f" {training.processes} process(es){_machines(training)}, {training.precision}, {training.optimizer},"
        f" {training.state_format} state"
    )
    if found.found_here:
        yield f"Looked up on this machine: {', '.join(found.found_here)}"
    yield ""
    yield from needs_table(found.asked, found.resources)
    yield from _verdict(found)
    shown = found.asked if found.asked.fits else found.best
    yield from _pace(shown, found)
    yield from _without_storage(found.alternatives)
    if shown.fits:
        yield from _recipes(shown, found)


def _machines(training: Training) -> str:
    return f" on each of {training.nodes} machines" if training.nodes > 1 else ""


def _verdict(found: Findings) -> Iterator[str]:
    yield ""
    if found.asked.fits:
        known = "" if found.model.passes is not None else " as far as is known: activations were not counted"
        yield f"It fits{known}{_tight(found.asked, found)}."
        if _changes(found.best, found.asked):
            roomier = found.asked.tight and not found.best.tight
            better = "A tenth of the memory stays free" if roomier else "It may be faster"
            yield f"{better} with {', '.join(_changes(found.best, found.asked))}."
        return
    yield "It does not fit as asked:"
    yield from (f"  {what_breaks(need, found.resources)}" for need in found.asked.broken)
    best = found.best
    if not best.fits:
        yield "No combination fits: tried were other places for parameters and for building the model, activation"
        yield "checkpoints, training that waits for its checkpoints, smaller micro-batches and state formats, and bf16."
    if _changes(best, found.asked):
        verdict = f"It fits{_tight(best, found)}" if best.fits else "It lacks the least"
        yield f"{verdict} with {', '.join(_changes(best, found.asked))}:"
        yield ""
        yield from needs_table(best, found.resources)


def _tight(plan: Plan, found: Findings) -> str:
    return f", but takes {what_is_tight(plan.tight, found.resources)}" if plan.tight else ""


def _changes(plan: Plan, asked: Plan) -> list[str]:
    before, after = asdict(asked.training), asdict(plan.training)
    # State in memory follows from the memory that other settings leave.
    return [_setting(name, after[name]) for name in after if after[name] != before[name] and name not in _FOLLOWING]


def _setting(name: str, value: object) -> str:
    """Return a setting as a user would write it."""
    if name in ("gradient_budget", "parameter_budget"):
        return f"{name.removesuffix('_budget')}_bytes=" + (
            f"'{value / 1e9:g}GB'" if isinstance(value, int) else "'auto'"
        )
    return f"{name}={value!r}"


def _pace(plan: Plan, found: Findings) -> Iterator[str]:
    yield ""
    if plan.pace is None:
        yield "The time of a step is unknown, as forward and backward could not be counted."
        return
    yield "Seconds of a step; the update runs during the next forward"
    for name in _PARTS:
        if name == "network" and plan.training.nodes == 1:
            continue
        yield f"  {name:<12}{_range(getattr(plan.pace, name))}"
    yield f"Hours per million tokens: {_range(plan.pace.hours_per_million_tokens)}"
    if plan.training.tokens is not None:
        millions = plan.training.tokens / 1e6
        yield f"Hours of the training:    {_range(plan.pace.hours_per_million_tokens.times(millions))}"
        written = plan.pace.written_bytes * plan.training.tokens / plan.pace.tokens_per_step
        may = f"the {found.tbw:,.0f} TB that the {_drives(found)} may write"
        worn = f", more than {may}" if written > found.tbw * _TERA else ""
        yield f"Written by the training:  {written / _TERA:,.1f} TB{worn}"
    yield _life(plan.pace, found)


def _life(pace: Pace, found: Findings) -> str:
    of = "as given" if found.tbw_given else "assumed: 600 TB for each TB of its size"
    days = _range(pace.life_in_days(found.tbw))
    steps = pace.life_in_steps(found.tbw)
    return f"Life of the {_drives(found)} ({found.tbw:.0f} TB written, {of}): {steps:,.0f} steps; days: {days}"


def _drives(found: Findings) -> str:
    return "drive" if found.drives == 1 else f"{found.drives} drives"


def _without_storage(alternatives: Sequence[Alternative]) -> Iterator[str]:
    yield ""
    yield "Without storage"
    for one in alternatives:
        word = "fits" if one.fits else "too big"
        yield f"  {one.name:<34}{in_gb(one.total):>9} of {in_gb(one.available)} GB  {word}"
    fitting = next((one for one in alternatives if one.fits and one.full_precision), None)
    if fitting is not None:
        yield f"You need no storage: {fitting.name} fits, and is faster."


def _recipes(plan: Plan, found: Findings) -> Iterator[str]:
    how: dict[str, Any] = {
        "storage": found.storage / "smart_infinity",
        "on_gpu": found.resources.on_gpu,
        "sets_cache": plan.training.cache_bytes != default_cache(found.model, plan.training, found.resources),
    }
    yield ""
    yield "Python"
    yield ""
    yield python_recipe(plan.training, **how)
    yield ""
    yield "YAML, for LightningCLI (pip install 'jsonargparse[signatures]')"
    yield ""
    yield yaml_recipe(plan.training, **how)


def print_table(findings: Sequence[Findings]) -> None:
    """Print a Markdown table with a row per model: its best plan, which fits or has the least shortage."""
    heads = ("model", "GPU GB", "host GB", "disk GB", "step s", "drive life, steps", "what breaks first as asked")
    print(f"| {' | '.join([*heads, 'fits with'])} |")
    print("|---" * (len(heads) + 1) + "|")
    for found in findings:
        print(f"| {' | '.join(_row(found))} |")


def _row(found: Findings) -> list[str]:
    plan = found.best
    most = {place: max((need.total for need in plan.needs if need.place is place), default=0) for place in MemoryKind}
    broken = found.asked.broken
    first = f"{broken[0].place.value}: {broken[0].largest}" if broken else "nothing"
    changes = ", ".join(_changes(plan, found.asked)) or "the defaults"
    changes = f"{changes}{_tight(plan, found)}" if plan.fits else f"nothing; nearest: {changes}"
    step = life = ""
    if plan.pace is not None:
        step, life = _bounds(plan.pace.step), f"{plan.pace.life_in_steps(found.tbw):,.0f}"
    return [found.model.name, *(in_gb(most[place]) for place in MemoryKind), step, life, first, changes]


def as_json(found: Findings) -> dict[str, Any]:
    """Return the findings as plain values: bytes, seconds, and ranges as [low, high, measured]."""
    model = found.model
    return {
        "model": {
            "name": model.name,
            "assumed": model.assumed,
            "parameters": model.numel,
            "trained": model.trained_numel,
            "layers": model.num_layers,
            "passes": None if model.passes is None else asdict(model.passes),
        },
        "machine": asdict(found.resources),
        "asked": _plan_json(found.asked),
        "best": _plan_json(found.best),
        "drive": {"drives": found.drives, "tbw": found.tbw, "assumed": not found.tbw_given},
        "without_storage": [
            {"name": one.name, "bytes": one.total, "available": one.available, "fits": one.fits, "owners": one.owners}
            for one in found.alternatives
        ],
    }


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "training": asdict(plan.training),
        "fits": plan.fits,
        "needs": [
            {"place": need.place.name.lower(), "phase": need.phase, "bytes": need.total, "owners": dict(need.owners)}
            for need in plan.needs
        ],
        "broken": [*map(_need_json, plan.broken)],
        "tight": [*map(_need_json, plan.tight)],
        "seconds": None if plan.pace is None else {name: _triple(getattr(plan.pace, name)) for name in _PARTS},
        "hours_per_million_tokens": None if plan.pace is None else _triple(plan.pace.hours_per_million_tokens),
        "written_bytes": None if plan.pace is None else plan.pace.written_bytes,
    }


def _need_json(need: Need) -> dict[str, str]:
    return {"place": need.place.name.lower(), "phase": need.phase, "owner": need.largest}


def _triple(of: Range) -> list[float | bool]:
    return [of.low, of.high, of.measured]


def _range(of: Range) -> str:
    return _bounds(of) if of.measured else f"{_short(of.low)} to {_short(of.high)} (not measured)"


def _bounds(of: Range) -> str:
    return _short(of.low) if _short(of.low) == _short(of.high) else f"{_short(of.low)} to {_short(of.high)}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _count(numel: int) -> str:
    return f"{numel / 1e9:.2f}B" if numel >= _GIGA else f"{numel / 1e6:.1f}M"
