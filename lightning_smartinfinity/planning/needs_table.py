"""Formats the needs of a training, and the available resources, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lightning_smartinfinity.planning.choice import TIGHT, Plan, Resources
from lightning_smartinfinity.planning.needs import Need

__all__ = ["in_gb", "needs_table", "what_breaks", "what_is_tight"]

_GIGA = 1e9
_SHOWN_OWNERS = 4


def needs_table(plan: Plan, resources: Resources) -> Iterator[str]:
    """Yield the lines of a table with a row for each place and phase of a training."""
    yield f"{'place':<13}{'while':<10}{'needs':>9}{'has':>9}  {'':<9}owners, in GB"
    for need in plan.needs:
        has = resources.has(need.place)
        word = "TOO BIG" if need.total > has else "tight" if need.total > TIGHT * has else "fits"
        amounts = f"{in_gb(need.total):>9}{in_gb(has):>9}"
        yield f"{need.place.value:<13}{need.phase:<10}{amounts}  {word:<9}{_owners(need.owners)}"


def what_breaks(need: Need, resources: Resources) -> str:
    """Return words for a need that exceeds the available bytes."""
    what = f"{need.largest} {in_gb(need.owners[need.largest])} GB"
    has = in_gb(resources.has(need.place))
    return f"{need.place.value} ({need.phase}) needs {in_gb(need.total)} of {has} GB, mostly {what}"


def what_is_tight(needs: Sequence[Need], resources: Resources) -> str:
    """Return words for tight needs: the largest share of the available bytes in each place."""
    shares: dict[str, float] = {}
    for need in needs:
        place = need.place.value
        shares[place] = max(shares.get(place, 0.0), need.total / resources.has(need.place))
    return ", ".join(f"{100 * share:.0f} % of {place}" for place, share in shares.items())


def in_gb(nbytes: float) -> str:
    """Return a number of bytes in GB, without a unit."""
    return f"{nbytes / _GIGA:.0f}" if nbytes >= 100 * _GIGA else f"{nbytes / _GIGA:.2f}"


def _owners(owners: Mapping[str, int]) -> str:
    ordered = sorted(owners.items(), key=lambda item: -item[1])
    shown = [f"{name} {in_gb(nbytes)}" for name, nbytes in ordered[:_SHOWN_OWNERS]]
    rest = sum(nbytes for _, nbytes in ordered[_SHOWN_OWNERS:])
    return ", ".join([*shown, f"other {in_gb(rest)}"] if rest else shown)
