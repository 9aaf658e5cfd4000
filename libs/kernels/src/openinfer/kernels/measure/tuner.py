"""Measure the kernels that a linear layer may use on this GPU, and keep the best for `choices.choose`.

Times are of a CUDA graph of many calls that rotate among copies of the weights, so that the L2 cache does not serve
them; a candidate must agree with the untuned choice. For gate_up_silu the gate is part of the time. The norm is not.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from openinfer.kernels.errors import KernelsError
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.linear.choices import rule
from openinfer.kernels.linear.kernels import launches
from openinfer.kernels.linear.problem import Problem
from openinfer.kernels.norms import Norm
from openinfer.kernels.op.launch import Command, Launch, depth
from openinfer.kernels.op.target import Target, shared_bytes
from openinfer.kernels.packs.cublas import CublasLt, cublas_available
from openinfer.kernels.packs.cuda import LaunchPack
from openinfer.kernels.packs.cuda_driver import CudaDriver
from openinfer.kernels.store.cubins import Store
from openinfer.kernels.store.tables import ProductChoice, Table
from openinfer.tensor import Device, Event, Stream, Tensor, bfloat16, check, driver, float32

COPIES_BYTES = 256 << 20
TOLERANCE = 1e-2
EPS = 1e-6
NODE_PRIORITIES = 8  # as graph.StepGraphs has it: branches keep the priority of their stream
MOST_ROWS = 512
"""Logits are of rows, of which a step has fewer than tokens."""

FIELDS = {
    "gemv": ("kind", "bn", "bk", "warps", "stages"),
    "small": ("kind", "bm", "bn", "bk", "split", "warps", "stages"),
    "tma": ("kind", "bm", "bn", "bk", "warps", "stages"),
    "pointer": ("kind", "bm", "bn", "bk", "warps", "stages"),
    "cublas": ("kind",),
}

Array = np.ndarray[Any, Any]


class ProductShape(NamedTuple):
    """A linear layer: its op ("logits" is norm_linear into float32), rows and columns of its weight."""

    op: str
    n: int
    k: int


class Measured(NamedTuple):
    """The result for a layer with `m` tokens: seconds a call by choice, of the choices that run and are right."""

    shape: ProductShape
    m: int
    seconds: Mapping[ProductChoice, float]
    problems: Sequence[str]

    @property
    def best(self) -> ProductChoice:
        """The fastest."""
        return min(self.seconds, key=self.seconds.__getitem__)


class Meter(Protocol):
    """Runs choices: a GPU, or a test's stand-in."""

    target: Target

    def layer(self, shape: ProductShape, most: int) -> Callable[[int, Sequence[ProductChoice]], Measured]:
        """The layer with weights of its own, for at most `most` tokens: a function of tokens and choices."""


def candidates(target: Target, op: str, m: int, n: int, k: int) -> Iterator[ProductChoice]:
    """Choices that may be worth a measurement; the untuned choice comes first."""
    yield rule(target, op, m, n, k)
    if target.cublas:
        yield ProductChoice("cublas")
    if m == 1:
        for bn, bk, warps, stages in (
            (2, 1024, 4, 3), (4, 512, 4, 3), (4, 1024, 8, 3), (8, 256, 4, 4), (8, 512, 4, 3), (8, 512, 4, 4),
            (8, 512, 8, 4), (16, 256, 4, 4), (16, 512, 8, 3),
        ):  # fmt: skip
            yield ProductChoice("gemv", 1, bn, depth(k, bk), 1, warps, stages)
    if m <= 128:
        bm = max(16, 1 << (m - 1).bit_length())
        for bn, bk, warps, stages in (
            (32, 128, 4, 4), (64, 64, 4, 5), (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 4),
            (128, 64, 4, 5), (128, 128, 8, 3), (128, 128, 4, 3), (128, 128, 4, 4),
        ):  # fmt: skip
            for split in (1, 2, 3, 4, 5, 6, 8):
                tiles = -(-n // bn) // (2 if op == "gate_up_silu" else 1)
                if split == 1 or (tiles * split <= 6 * target.num_sms and k // depth(k, bk) >= 2 * split):
                    yield ProductChoice("small", bm, bn, depth(k, bk), split, warps, stages)
    if m > 16:
        kind: Any = "tma" if target.arch >= 90 else "pointer"
        for bm, bn, bk, warps, stages in (
            (64, 64, 128, 4, 4), (64, 128, 64, 4, 4), (64, 128, 64, 4, 5), (64, 128, 128, 4, 3), (64, 256, 64, 4, 4),
            (128, 128, 64, 4, 4), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3),
            (256, 128, 64, 8, 3),
        ):  # fmt: skip
            if bm < 2 * m and not (m >= 1024 and bm * bn < 128 * 128):
                yield ProductChoice(kind, bm, bn, depth(k, bk), 1, warps, stages)


def tune(
    meter: Meter,
    shapes: Sequence[ProductShape],
    tokens: Sequence[int],
    known: Table,
    progress: Callable[[int, int], None],
    budget_s: float = math.inf,
) -> Iterator[Measured]:
    """Measure each layer at each of these token counts, except entries of `known`, and stop after `budget_s` seconds.
    `progress` gets the number of measurements that are done, and the number of all."""
    began, done = time.monotonic(), 0
    work = missing(shapes, tokens, known)
    total = sum(map(len, work.values()))
    for shape, counts in work.items():
        layer = None
        for m in counts:
            if time.monotonic() - began >= budget_s:
                return
            layer = layer or meter.layer(shape, max(counts))
            yield layer(m, list(dict.fromkeys(candidates(meter.target, shape.op, m, shape.n, shape.k))))
            done += 1
            progress(done, total)


def missing(
    shapes: Sequence[ProductShape], tokens: Sequence[int], known: Table
) -> dict[ProductShape, list[int]]:
    """The measurements that a table lacks, by layer."""
    return {
        shape: [
            m
            for m in tokens
            if str(m) not in known.get(shape.op, {}).get(f"{shape.n}x{shape.k}", {})
            and (shape.op != "logits" or m <= MOST_ROWS)
        ]
        for shape in shapes
    }


def entry(choice: ProductChoice) -> dict[str, Any]:
    """A choice as the tables have it."""
    return {name: getattr(choice, name) for name in FIELDS[choice.kind]}


class DeviceMeter:
    """The GPU, and what runs on it."""

    def __init__(self) -> None:
        self.device = Device("cuda", 0)
        self.device.activate()
        self.stream = Stream(self.device)
        lt = CublasLt() if cublas_available() else None
        self.target = Target.of(self.device, cublas=lt is not None)
        self.store = Store(self.device.arch)
        scratch, zeroed = (Tensor.empty((size,), "uint8", self.device) for size in (1 << 30, 1 << 20))
        zeroed.zero_(self.stream)
        self.driver = CudaDriver(self.device, self.stream, self.store, lt)
        self.pack = LaunchPack(self.target, self.driver, scratch, zeroed)

    def layer(self, shape: ProductShape, most: int) -> Callable[[int, Sequence[ProductChoice]], Measured]:
        """See Meter."""
        return _Layer(self, shape, most).measured

    def fill(self, tensor: Tensor, scale: float, rng: np.random.Generator) -> None:
        """Random values, by one block of them copied until the tensor is full."""
        block = (rng.standard_normal(min(tensor.numel, 1 << 20)) * scale).astype(tensor.dtype)
        flat = tensor.reshape(-1)
        for start in range(0, tensor.numel, block.size):
            part = flat[start : start + block.size]
            part.copy_from(block[: part.numel], self.stream)
        self.stream.synchronize()

    def seconds(self, calls: Sequence[Callable[[], None]]) -> float:
        """Device time of one call: the median of replays of a graph of them."""
        cu = driver()
        for call in calls:
            call()
        self.stream.synchronize()
        repeat = max(1, 48 // len(calls))
        check(cu.cuStreamBeginCapture(self.stream.handle, cu.CUstreamCaptureMode(1)), "cuStreamBeginCapture")
        for _ in range(repeat):
            for call in calls:
                call()
        graph = check(cu.cuStreamEndCapture(self.stream.handle), "cuStreamEndCapture")
        executable = check(cu.cuGraphInstantiate(graph, NODE_PRIORITIES), "cuGraphInstantiate")
        start, end = Event(self.device, timing=True), Event(self.device, timing=True)
        times = []
        for _ in range(6):
            start.record(self.stream)
            check(cu.cuGraphLaunch(executable, self.stream.handle), "cuGraphLaunch")
            end.record(self.stream)
            end.synchronize()
            times.append(end.elapsed_s(start))
        check(cu.cuGraphExecDestroy(executable), "cuGraphExecDestroy")
        check(cu.cuGraphDestroy(graph), "cuGraphDestroy")
        return sorted(times[1:])[2] / (repeat * len(calls))


class _Layer:
    """One linear layer's tensors on the device."""

    def __init__(self, meter: DeviceMeter, shape: ProductShape, most: int) -> None:
        self._meter, self.shape = meter, shape
        op, n, k = shape
        self._gated = op == "gate_up_silu"
        rng = np.random.default_rng(n + k)
        copies = max(1, min(12, math.ceil(COPIES_BYTES / (n * k * 2))))
        self.weights = [Tensor.empty((n, k), bfloat16, meter.device) for _ in range(copies)]
        for weight in self.weights:
            meter.fill(weight, k**-0.5, rng)
        self.x = Tensor.empty((most, k), bfloat16, meter.device)
        self.gain = Tensor.empty((k,), bfloat16, meter.device)
        meter.fill(self.x, 1.0, rng)
        meter.fill(self.gain, 1.0, rng)
        width = n // 2 if self._gated else n
        self.out = Tensor.empty((most, width), float32 if op == "logits" else bfloat16, meter.device)

    def commands(self, choice: ProductChoice, m: int, weight: Tensor) -> list[Command]:
        x, out, target, op = self.x[:m], self.out[:m], self._meter.target, self.shape.op
        if op == "linear_add":
            return list(launches(Problem(target, op, out, x, Linear(weight), "add", choice=choice)))
        plain = Problem(target, op, out, x, Linear(weight), norm=Norm(self.gain, EPS), choice=choice)
        return list(launches(replace(plain, epilogue="gated") if self._gated else plain))

    def measured(self, m: int, choices: Sequence[ProductChoice]) -> Measured:
        """Compile the choices and time each that runs and is right; the first says what is right."""
        problems = []
        specs = [c.spec for choice in choices for c in self._launches(choice, m)]
        try:
            self._meter.store.prepare(specs)
        except KernelsError as error:
            problems.append(f"some do not compile: {error}")
        want = self._result(choices[0], m)
        seconds: dict[ProductChoice, float] = {}
        for choice in choices:
            found = self._seconds(choice, m, want)
            if isinstance(found, str):
                problems.append(f"{choice}: {found}")
            else:
                seconds[choice] = found
        return Measured(self.shape, m, seconds, problems)

    def _launches(self, choice: ProductChoice, m: int) -> list[Launch]:
        return [c for c in self.commands(choice, m, self.weights[0]) if isinstance(c, Launch)]

    def _result(self, choice: ProductChoice, m: int) -> Array:
        """A sample of the rows that the choice writes onto zeros."""
        self.out.zero_(self._meter.stream)
        self._meter.pack.submit(str(choice), self.commands(choice, m, self.weights[0]))
        self._meter.stream.synchronize()
        return self.out[: min(m, 16)].numpy().astype(np.float32)

    def _seconds(self, choice: ProductChoice, m: int, want: Array) -> float | str:
        """Seconds of a call, or the reason why it was not measured."""
        store, pack = self._meter.store, self._meter.pack
        limit = shared_bytes(self._meter.target.arch)
        try:
            if any(store.get(c.spec).shared > limit for c in self._launches(choice, m)):
                return f"more than {limit} bytes of shared memory"
            got = self._result(choice, m)
        except KernelsError as error:
            return str(error)
        error_of = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        if not error_of < TOLERANCE:
            return f"wrong by {error_of:.1e}"
        calls = [functools.partial(pack.submit, "tune", self.commands(choice, m, w)) for w in self.weights]
        return self._meter.seconds(calls)
