"""Prints the Smart-Infinity paper's tables beside simulated values, and this package on the same machine.

    python benchmarks/paper_tables.py

Nothing is measured, so the figures are the same on every machine. Tables are in Markdown, for docs/reproduction.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isnan

from machine import describe

from lightning_smartinfinity.planning.paper.fit import fit, published_workload
from lightning_smartinfinity.planning.paper.paper import SCALING, SPARSE_KERNEL_SHOWN
from lightning_smartinfinity.planning.paper.reproduction import (
    SYSTEMS,
    Prediction,
    headroom,
    mean_error,
    predictions,
    relative_to_one_device,
)
from lightning_smartinfinity.planning.simulator.gradients import Dense
from lightning_smartinfinity.planning.simulator.handler import Route
from lightning_smartinfinity.planning.simulator.hardware import Machine
from lightning_smartinfinity.planning.simulator.step import Overlap, System, simulate_step
from lightning_smartinfinity.planning.simulator.workload import Workload

SSD_TIME = {False: "shared", True: "duplex"}
OUTLIER = 0.1
BILLIONS, NUM_DEVICES = 8.4, 10


def print_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def print_parameters() -> None:
    """Print the figures of the paper's machine."""
    of = {duplex: fit(duplex=duplex).parameters for duplex in SSD_TIME}
    rows = []
    for name, figure in of[False].items():
        scale = 1e-9 if figure.unit == "B/s" else 1.0
        unit = "GB/s" if figure.unit == "B/s" else figure.unit
        values = [f"{scale * of[duplex][name].value:.3g}" for duplex in SSD_TIME]
        rows.append([f"`{name}`", *values, unit, figure.source])
    print_table("Parameters", ["parameter", *(f"SSD time {how}" for how in SSD_TIME.values()), "unit", "source"], rows)


def print_paper(duplex: bool) -> list[Prediction]:
    """Print the paper's tables: number / simulated; simulated values that were fitted stand in brackets."""
    found = predictions(fit(duplex=duplex))
    for table, title in (
        ("seconds", "Seconds per iteration"),
        ("speedups", "Times as fast as ZeRO-Infinity"),
        ("scaling", "Scaling, in seconds per iteration"),
    ):
        cells: dict[tuple[str, str, str], dict[str, str]] = {}
        for one in found:
            if one.table == table:
                row = cells.setdefault((one.model, one.gpu, str(one.num_devices)), {})
                simulated = f"({one.simulated:.2f})" if one.fitted else f"{one.simulated:.2f}"
                row[one.system] = f"{one.paper:.2f} / {simulated}"
        names = [name for name in SYSTEMS if any(name in row for row in cells.values())]
        rows = [[*key, *(row.get(name, "-") for name in names)] for key, row in cells.items()]
        print_table(f"{title}, SSD time {SSD_TIME[duplex]}", ["model", "GPU", "devices", *names], rows)
    return found


def print_errors(found: dict[bool, list[Prediction]]) -> None:
    """Print mean errors, and every prediction that is far off."""
    for duplex, of in found.items():
        rows = [[part, *(errors(numbers, name) for name in SYSTEMS)] for part, numbers in parts(of, duplex).items()]
        title = f"Mean error of what is predicted / of all, SSD time {SSD_TIME[duplex]}"
        print_table(title, ["numbers", *SYSTEMS], rows)
    outliers = [
        [SSD_TIME[duplex], one.system, one.model, one.gpu, str(one.num_devices), f"{one.error:+.0%}"]
        for duplex, of in found.items()
        for one in of
        if abs(one.error) > OUTLIER
    ]
    print_table(
        f"More than {OUTLIER:.0%} off",
        ["SSD time", "system", "model", "GPU", "devices", "simulated is off by"],
        outliers,
    )


def parts(found: list[Prediction], duplex: bool) -> dict[str, list[Prediction]]:
    """Group the numbers by table; then all of them, also as simulated with the kernel's own figure."""
    relative = relative_to_one_device(found)
    shown = predictions(fit(duplex=duplex, sparse_kernel=SPARSE_KERNEL_SHOWN))
    return {
        "seconds, GPT-2, A5000": [
            one for one in found if one.table == "seconds" and "GPT" in one.model and one.gpu == "A5000"
        ],
        "seconds, BERT, A5000": [one for one in found if "BERT" in one.model],
        "seconds, GPT-2, A100": [one for one in found if one.table == "seconds" and one.gpu == "A100"],
        "larger models, A5000": [one for one in found if one.table == "speedups"],
        **{f"scaling, {gpu}": [one for one in found if one.table == "scaling" and one.gpu == gpu] for gpu in SCALING},
        "**all**": found,
        "all, `sparse_kernel` at 2.9 GB/s": [one for one in shown if one.system == "SU+O+C"],
        **{f"scaling relative to one SSD, {gpu}": [one for one in relative if one.gpu == gpu] for gpu in SCALING},
        "scaling relative to one SSD, both": relative,
    }


def errors(found: list[Prediction], system: str) -> str:
    """Format the mean errors of predicted numbers / of all numbers."""
    means = (mean_error(found, system, fitted=False), mean_error(found, system))
    return " / ".join("-" if isnan(error) else f"{error:.1%}" for error in means)


def print_headroom() -> None:
    """Print the gain if only overlap differs."""
    of = {duplex: headroom(fit(duplex=duplex).machine(NUM_DEVICES)) for duplex in SSD_TIME}
    rows = []
    for duplex, one in of.items():
        for name, time in (
            ("SU+O", one.published),
            ("ours", one.ours),
            ("ours, next forward hidden", one.hidden),
            ("SU+O+C", one.published_compressed),
            ("ours, compressed", one.ours_compressed),
            ("ours, compressed, next forward hidden", one.hidden_compressed),
        ):
            base = one.published_compressed if "ompressed" in name or name == "SU+O+C" else one.published
            rows.append(
                [
                    SSD_TIME[duplex],
                    name,
                    *(f"{seconds:.2f}" for seconds in (time.forward, time.backward, time.update, time.step)),
                    f"{base.update / time.update:.2f}x",
                    f"{base.step / time.step:.2f}x",
                ]
            )
    head = ["SSD time", "handler", "forward s", "backward s", "update s", "step s", "update", "step"]
    print_table(f"Only overlap changed: {BILLIONS}B, {NUM_DEVICES} devices, A5000, bytes as published", head, rows)


def print_sensitivity() -> None:
    """Print how far the gains depend on the figures."""
    rows = []
    for duplex in SSD_TIME:
        machine = fit(duplex=duplex).machine(NUM_DEVICES)
        for name, other in variants(machine).items():
            ratios = headroom(other).ratios.values()
            rows.append([SSD_TIME[duplex], name, *(f"{ratio:.2f}x" for ratio in ratios)])
    head = list(headroom(fit(duplex=False).machine(NUM_DEVICES)).ratios)
    print_table("The same with other figures, nothing fitted anew", ["SSD time", "figures", *head], rows)


def variants(machine: Machine) -> dict[str, Machine]:
    """Return machines with one figure changed at a time."""
    device, host, gpu, channel = machine.device, machine.host, machine.gpu, machine.channel
    serial = replace(gpu, backward=gpu.backward + host.receive)
    return {
        "as above": machine,
        "SSDs at 3.2 and 1.7 GB/s": replace(machine, device=replace(device, read=3.2e9, write=1.7e9)),
        "SSDs at 2.8 and 1.5 GB/s": replace(machine, device=replace(device, write=1.5e9)),
        "kernels at 2.9 GB/s": replace(machine, device=replace(device, kernel=2.9e9, sparse_kernel=2.9e9)),
        "channel at 8 GB/s": replace(machine, channel=replace(channel, down=8e9, up=8e9, together=8e9)),
        "`receive` 0": replace(machine, host=replace(host, receive=0.0)),
        "`receive` of all handlers outside of the update": replace(
            machine, gpu=serial, host=replace(host, receive=0.0)
        ),
    }


def print_ours(devices: Sequence[int]) -> None:
    """Print this package beside the published systems, by the number of devices."""
    ways = {
        "ours, bytes as published": (published_workload(4.0), Overlap.NONE, Route.BACKWARD),
        "ours, bf16": (Workload(numel=4 * 10**9, gradients=Dense(2)), Overlap.NONE, Route.HOST),
        "ours, bf16, next forward hidden": (Workload(numel=4 * 10**9, gradients=Dense(2)), Overlap.FORWARD, Route.HOST),
    }
    for gpu in SCALING:
        rows = []
        for duplex in SSD_TIME:
            paper = fit(duplex=duplex)
            series: dict[str, list[float]] = {}
            for number in devices:
                machine = paper.machine(number, gpu)
                for name in ("ZeRO-Infinity", "SU+O", "SU+O+C"):
                    system, compressed = SYSTEMS[name]
                    of = published_workload(4.0, compressed=compressed)
                    series.setdefault(name, []).append(simulate_step(machine, of, system).step)
                for name, (of, overlap, route) in ways.items():
                    step = simulate_step(machine, of, System.CARDS, overlap=overlap, route=route).step
                    series.setdefault(name, []).append(step)
            rows += [[SSD_TIME[duplex], name, *(f"{step:.1f}" for step in steps)] for name, steps in series.items()]
        head = ["SSD time", "handler", *map(str, devices)]
        print_table(f"GPT-2 4.0B on an {gpu}: simulated seconds by devices", head, rows)


def main() -> None:
    """Print the tables below the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(describe("numpy"))
    print_parameters()
    print_errors({duplex: print_paper(duplex) for duplex in SSD_TIME})
    print_headroom()
    print_sensitivity()
    print_ours(SCALING["A5000"].num_devices)


if __name__ == "__main__":
    main()
