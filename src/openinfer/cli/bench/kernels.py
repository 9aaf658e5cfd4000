"""`openinfer bench kernels [OP ...]`: ops at the shapes that their modules name, on this GPU.

Times are medians of a CUDA graph of calls. The calls rotate among copies of weights or cache, so that the L2 cache does
not serve them. With --variants other launches of the same op stand beside those that are chosen, if their output is the
same. `--list` names the cases and needs no GPU.
"""

import argparse
import importlib
import importlib.metadata
import logging
import math
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from openinfer.cli.bench.record import add_record_arguments, record, write
from openinfer.cli.explain.ledger import Machine, entry_figures, machine, machine_flags
from openinfer.frontend.flag_parser import FlagParser
from openinfer.kernels.measure import Measurement, measure
from openinfer.kernels.measure.tuner import DeviceMeter
from openinfer.kernels.op.cases import Memory, OpCase
from openinfer.tensor import Device, TensorError

PACKAGES = ("openinfer.kernels.ops", "openinfer.sampler.gpu.ops")
"""Packages of ops, beside those of the installed recipes."""


def main(argv: list[str]) -> int:
    """Measure or list; returns 0, 1 without a GPU, 2 for wrong arguments."""
    prog = "openinfer bench kernels"
    parser = FlagParser(prog, usage=f"{prog} [OP ...] [flags]", description=__doc__)
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help="names of ops; default: all ops with cases")
    add("--variants", action="store_true", help="measure other launches of each case too")
    add("--list", action="store_true", help="print the names of the cases and stop")
    machine_flags(parser)
    add_record_arguments(parser)
    args = parser.parse_args(argv)
    listed = list(installed_cases(Memory(Device("null")), args.ops))
    missing = set(args.ops) - {case.op.name for _, case in listed}
    if missing or not listed:
        known = ", ".join(sorted({case.op.name for _, case in installed_cases(Memory(Device("null")), [])}))
        parser.error(f"no cases for {', '.join(sorted(missing))}; ops with cases: {known}")
    if args.list:
        for _, case in listed:
            print(f"{case.op.name}: {case.name}")
        return 0
    return _measure(args)


def modules() -> Iterator[ModuleType]:
    """Every module of ops that has cases."""
    entries = importlib.metadata.entry_points(group="openinfer.recipes")
    recipes = (f"{entry.module}.ops" for entry in entries)
    for name in dict.fromkeys((*PACKAGES, *recipes)):
        try:
            package = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name == name:
                continue  # a recipe without ops of its own
            raise
        if not hasattr(package, "__path__"):  # all ops of a recipe in one module
            found = [package]
        else:
            inner = pkgutil.iter_modules(package.__path__, name + ".")
            found = [importlib.import_module(module.name) for module in inner]
        yield from (module for module in found if hasattr(module, "cases"))


def installed_cases(memory: Memory, ops: list[str]) -> Iterator[tuple[ModuleType, OpCase]]:
    """The cases of these ops, of all if none is named, with the module that each comes from."""
    for module in modules():
        for case in module.cases(memory):
            if not ops or case.op.name in ops:
                yield module, case


def _measure(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        meter = DeviceMeter()
    except TensorError as error:
        print(f"openinfer bench kernels: error: {error}", file=sys.stderr)
        return 1
    limits, results = machine(args), []
    try:
        for module, case in installed_cases(Memory(meter.device, meter.stream), args.ops):
            varied = args.variants and hasattr(module, "variants")
            others = module.variants(meter.target, case) if varied else ()
            for found in measure(meter, case, others):
                results.append(kernel_entry(case, found, limits))
                print(kernel_line(results[-1]), flush=True)
    finally:
        if args.json:
            write(args.json, record("kernels", args, results, target=meter.target.gpu))
    return 0


def kernel_entry(case: OpCase, found: Measurement, limits: Machine) -> dict[str, Any]:
    """The JSON entry of a measurement. Without a time `us` is None and `problem` says why."""
    cost = case.op.cost(case.workload, case.calls[0])
    floor_us, us = limits.floor_us(cost), found.seconds * 1e6
    known = not math.isnan(us)
    return {
        "op": case.op.name,
        "case": case.name,
        "variant": found.variant,
        "us": us if known else None,
        "bytes": cost.bytes,
        "flops": cost.flops,
        "floor_us": floor_us,
        "of_floor": floor_us / us if known else None,
        "problem": found.problem,
    }


def kernel_line(entry: dict[str, Any]) -> str:
    what = f"{entry['op']} {entry['case']}: {entry['variant']}"
    return f"{what}\n{entry_figures(entry) if entry['us'] is not None else '    ' + entry['problem']}"
