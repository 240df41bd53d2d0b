"""``smart-infinity plan``: reports whether a training fits, which settings make it fit, and how long it takes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_smartinfinity.cli.plan_options import (
    add_options,
    found_here,
    given_resources,
    require_budgets,
    training_of,
)

if TYPE_CHECKING:
    from lightning_smartinfinity.cli.plan_report import Findings
    from lightning_smartinfinity.planning.choice import Resources
    from lightning_smartinfinity.planning.pace import Rates
    from lightning_smartinfinity.planning.training import Training

__all__ = ["DESCRIPTION", "add_options", "run"]

DESCRIPTION = """\
Tell whether a training fits into GPU memory, host memory and disk, what breaks first, how long a step takes and how
long the drive lives; then the fastest settings that fit, ready to paste, and what would need no storage. Nothing of the
model is allocated unless --measure is given. Exit status 0: it fits, with the settings that are printed; 3: nothing
that was tried fits.
"""
_DOES_NOT_FIT = 3


def run(options: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    from lightning_smartinfinity.cli.plan_report import as_json, print_report, print_table

    found = [_announced_findings(spec, options) for spec in options.models]
    if options.json:
        printed = [as_json(one) for one in found]
        print(json.dumps(printed[0] if len(printed) == 1 else printed, indent=2))
    elif len(found) == 1:
        print_report(found[0])
    else:
        print_table(found)
    return 0 if all(one.best.fits for one in found) else _DOES_NOT_FIT


def _announced_findings(spec: str, options: argparse.Namespace) -> Findings:
    if len(options.models) > 1:  # a large model takes a quarter of a minute
        print(f"Planning {spec} ...", file=sys.stderr, flush=True)
    return _findings(spec, options)


def _findings(spec: str, options: argparse.Namespace) -> Findings:
    from lightning_smartinfinity.cli.plan_report import Findings
    from lightning_smartinfinity.planning.automatic import with_cache, with_ring
    from lightning_smartinfinity.planning.choice import alternatives, cheapest, make_plan, nearest
    from lightning_smartinfinity.planning.pace import TBW_PER_TB
    from lightning_smartinfinity.planning.survey.models import find_source, survey_model
    from lightning_smartinfinity.planning.survey.resources import survey_resources

    resources = given_resources(survey_resources(options.storage), options)
    training = with_ring(training_of(options, resources), resources)
    source = find_source(spec, arguments=options.init_args)
    model = survey_model(source, batch=training.batch, seq=training.seq, in_16_bit=training.item_bytes == 2)
    training = replace(training, checkpointing=training.checkpointing or model.checkpointing)
    require_budgets(model, training, on_gpu=resources.on_gpu)
    rates = _rates(options, training, resources, source=source, model=model)
    best = cheapest(model, training, resources, rates) or nearest(model, training, resources, rates)
    planned = [training, best.training]
    if options.cache_bytes is None:  # as the strategy does by default
        planned = [with_cache(model, one, resources) for one in planned]
    asked, best = (make_plan(model, one, resources, rates) for one in planned)
    return Findings(
        model=model,
        resources=resources,
        asked=asked,
        best=best,
        found_here=found_here(options),
        alternatives=alternatives(model, training, resources),
        drives=options.drives,
        tbw=options.drives * (options.tbw or TBW_PER_TB * resources.drive_bytes / 1e12),
        tbw_given=options.tbw is not None,
        storage=options.storage,
    )


def _rates(options: argparse.Namespace, training: Training, resources: Resources, *, source: Any, model: Any) -> Rates:
    from lightning_smartinfinity.planning.pace import Range, assumed_rates

    rates = assumed_rates(on_gpu=resources.on_gpu, cores=resources.cores, in_16_bit=training.item_bytes == 2)
    if options.measure:
        from lightning_smartinfinity.planning.survey.rates import measure_rates, require_device

        device = require_device("cuda" if resources.on_gpu else "cpu")
        print("Measuring layers, memory and the drive, for about a minute.", file=sys.stderr, flush=True)
        rates = measure_rates(source, model, training, rates, storage=options.storage, device=device)
    names = ("drive_read", "drive_write", "network")
    given = {name: getattr(options, name) for name in names if getattr(options, name)}
    rates = replace(rates, **{name: Range(rate, rate, measured=True) for name, rate in given.items()})
    read, write = (rate.times(options.drives) for rate in (rates.drive_read, rates.drive_write))
    return replace(rates, drive_read=read, drive_write=write)
