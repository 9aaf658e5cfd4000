"""Op calls as lines of a ledger: the name has all that their time depends on; each has its cost and its floor."""

import argparse
import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from openinfer.frontend.errors import FlagError
from openinfer.kernels import GPUS, H200, Cost, Op, Target, Workload
from openinfer.kernels.authoring import Composite, leaves, linear_of
from openinfer.tensor import Tensor

if TYPE_CHECKING:
    from openinfer.cli.explain.segments import Segment

BATCH = ("slots", "q_starts")
"""Arguments of the ops whose work depends on how tokens are spread over rows."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The limits of a device: bytes/s to and from its memory, FLOP/s of its matrix units in bf16, and bytes/s to other
    GPUs. The defaults are those of an H200: measured figures, and the vendor's figure for links."""

    bytes_per_s: float = GPUS[H200.gpu].measured.bytes_per_s
    flops_per_s: float = GPUS[H200.gpu].measured.flops_per_s
    link_bytes_per_s: float = GPUS[H200.gpu].link_bytes_per_s

    def floor_us(self, cost: Cost) -> float:
        """The lower bound of one call's time in microseconds, for any implementation."""
        return cost.floor_s(self.bytes_per_s, self.flops_per_s, self.link_bytes_per_s) * 1e6


class OpCall(NamedTuple):
    op: Op[Any]
    args: Any


@dataclass(slots=True)
class CallRecorder:
    """A pack that only writes the calls down, whatever device the tensors are on. target: whose kernels may join
    calls (see kernels.authoring.joined)."""

    calls: list[OpCall] = dataclasses.field(default_factory=list)
    target: Target | None = None

    def run(self, op: Op[Any], args: Any) -> None:
        self.calls.append(OpCall(op, args))


def recorded_calls(segments: "Iterable[Segment]", target: Target | None = None) -> list[OpCall]:
    """The calls of these segments. target: as of CallRecorder."""
    recorder = CallRecorder(target=target)
    for segment in segments:
        segment.run(recorder)
    return recorder.calls


def ledger_key(op: Op[Any], args: Any, workload: Workload) -> str:
    """A text of all that the time of a call depends on.

    It has the op and the shapes of its output and of its weight. Where they matter it has the rows, the tokens in the
    cache and the pairs of query and key. Of an op of several parts it has the keys of the parts."""
    if isinstance(op, Composite):
        parts = [ledger_key(part, getattr(args, name), workload) for name, part in op.parts.items()]
        return f"{op.name}: {'; '.join(parts)}"
    name, first = next(leaves(args, Tensor))
    parts = [f"{op.name} {name}{_shape(first)}"]
    weight = getattr(args, "weight", None)
    if weight is not None:
        own = linear_of(weight)
        parts.append(f"weight{_shape(own.weight)}" + f" in {own.packed.lower()}" * bool(own.packed))
    if getattr(args, "kv_scales", None) is not None:
        parts.append("cache in fp8")
    if getattr(args, "window", 0):
        parts.append(f"window {args.window}")
    batch = [getattr(args, n).shape[0] - (n == "q_starts") for n in BATCH if hasattr(args, n)]
    if batch:
        rows = batch[0]
        parts.append(f"{rows} rows")
        if getattr(args, "max_q_len", 1) > 1 and rows == first.shape[0]:  # else more tokens than rows say so
            parts.append("prompts")
    longer = dataclasses.replace(workload, kv_tokens=workload.kv_tokens + 1, qk_pairs=workload.qk_pairs + 1)
    if op.cost(longer, args) != op.cost(workload, args):
        parts.append(f"{workload.kv_tokens} cached, {workload.qk_pairs} pairs")
    return ", ".join(parts)


def grouped(calls: Iterable[OpCall], workload: Workload) -> dict[str, list[OpCall]]:
    """Calls of the same key together, in the order of their first."""
    groups: dict[str, list[OpCall]] = {}
    for op, args in calls:
        groups.setdefault(ledger_key(op, args, workload), []).append(OpCall(op, args))
    return groups


def entry_figures(entry: Mapping[str, Any]) -> str:
    """The time of an entry of a ledger beside its floor, and its rates, as text of at most 100 characters."""
    us = entry["us"]
    return (
        f"{us:13.2f} us, floor {entry['floor_us']:10.2f} ({entry['of_floor']:4.0%}), "
        f"{entry['bytes'] / us / 1e3:6.0f} GB/s {entry['flops'] / us / 1e6:5.0f} TFLOP/s"
    )


def microseconds(path: Path) -> dict[str, float]:
    """Microseconds a call by key, from what `openinfer bench ops --json` wrote. Raises FlagError, OSError."""
    return {name: float(entry["us"]) for name, entry in entries(path).items()}


def entries(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a ledger by key. Raises FlagError, OSError."""
    try:
        found = {entry["key"]: entry for entry in json.loads(path.read_text())["results"]}
        if all(one["us"] > 0 and one["calls_a_step"] and one["repeats"]["us"] for one in found.values()):
            return found
        raise ValueError("an entry without a time")
    except (ValueError, KeyError, TypeError) as error:
        raise FlagError(f"{path} is no ledger of `openinfer bench ops --json`: {error!r}") from None


def _shape(tensor: Tensor) -> str:
    return "[" + "x".join(map(str, tensor.shape)) + "]"


def machine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for the floor; the defaults are what was measured on an H200."""
    default, add = Machine(), parser.add_argument
    add("--bandwidth", type=float, default=default.bytes_per_s / 1e12, metavar="TB/S",
        help="bandwidth of device memory; default: %(default)s")  # fmt: skip
    add("--tflops", type=float, default=default.flops_per_s / 1e12, metavar="N",
        help="speed of the matrix units in bf16; default: %(default)s")  # fmt: skip


def machine(args: argparse.Namespace) -> Machine:
    return Machine(args.bandwidth * 1e12, args.tflops * 1e12)
