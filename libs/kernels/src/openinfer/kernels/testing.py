"""Tests for an op: its kernels beside its reference, and a suite that any op can run.

    class TestScale(OpConformance):
        op = scale
        cases = (Case({"out": np.full(8, np.nan, bfloat16), "x": ...}, outputs={"out": 1e-2}),)

The interpreter needs `TRITON_INTERPRET=1` in the environment before anything imports triton. Needs pytest only to run.
"""

import ctypes
import datetime
import functools
import importlib
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.kernels.attention.kv_cache import FP8_CACHE, KvLayout
from openinfer.kernels.errors import ContractError, RankLost
from openinfer.kernels.op.coded import Coded, write_values
from openinfer.kernels.op.launch import PeerTable
from openinfer.kernels.op.op import Op, Workload, leaves, mapped
from openinfer.kernels.op.rounding import SCALE_BLOCK
from openinfer.kernels.op.target import Target
from openinfer.kernels.packs import CpuPack
from openinfer.kernels.packs.cuda import LaunchPack
from openinfer.kernels.packs.cuda_driver import CudaDriver
from openinfer.kernels.packs.interp import InterpDriver
from openinfer.kernels.packs.null import NullPack
from openinfer.kernels.ranks.exchange import segment_bytes, table_of
from openinfer.kernels.store.cubins import Store
from openinfer.tensor import Arena, Device, Stream, Tensor, bfloat16, float8_e4m3fn, uint8

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Run = Callable[[Op[Any], Mapping[str, Any]], Arrays]

INTERPRETED = Target(arch=90, num_sms=4, interpreted=True)
"""A small GPU without cuBLASLt, for the interpreter."""

_MARGIN = 256  # bytes behind the scratch, which kernels must not write


def error(got: Array, want: Array) -> float:
    """The relative Frobenius error of the places where `want` is finite; infinite where `got` is finite elsewhere."""
    finite = np.isfinite(want.astype(np.float64))
    if not np.array_equal(finite, np.isfinite(got.astype(np.float64))):
        return float("inf")
    g, w = got[finite].astype(np.float64), want[finite].astype(np.float64)
    return float(np.linalg.norm(g - w)) / max(float(np.linalg.norm(w)), 1e-30)


NEVER = 0xFF
"""Every byte of codes that were never written: NaN as a code and as a scale."""


def never_coded(tokens: int, width: int, dtype: np.dtype[Any] = bfloat16) -> Coded[Array]:
    """What was never written, which is NaN."""
    scales = np.full((tokens, -(-width // SCALE_BLOCK)), NEVER, np.uint8)
    return Coded(np.full((tokens, width), NEVER, np.uint8).view(float8_e4m3fn), scales, dtype)


def codes_of(values: Array, dtype: np.dtype[Any] = bfloat16) -> Coded[Array]:
    """Float32 values [T, K] of a dtype through q8."""
    tokens, width = values.shape
    made = never_coded(tokens, width, dtype)
    write_values(made, values)
    return made


def values_in(arrays: Arrays, name: str) -> Array:
    """The values of an argument, which may be Coded, in what a run leaves."""
    if name in arrays:
        return arrays[name]
    codes = arrays[f"{name}.codes"]
    return Coded(codes, arrays[f"{name}.scales"], codes.dtype).values()


def coded_cache(pages: int, kv_heads: int, page_size: int, dim: int) -> Arrays:
    """The arguments `kv` and `kv_scales` of a layer of an FP8 cache that was never written. Other layers lie between
    its pages."""
    layout, cpu = KvLayout(3, kv_heads, page_size, dim, FP8_CACHE), Device("cpu")
    cache = layout.allocate(Arena(cpu, pages * layout.page_bytes + 512), Stream(cpu), pages)
    cache.pages.numpy()[:] = NEVER
    return {name: tensor.numpy() for name, tensor in cache.layer(1).items() if tensor is not None}


def paged_rows(
    rng: np.random.Generator,
    lengths: Sequence[int],
    before: Sequence[int],
    *,
    page_size: int,
    tokens: int | None = None,
    dead: Sequence[int] = (),
) -> Arrays:
    """The arguments by which an op finds a step's tokens in a paged cache, for rows of `lengths` new tokens after
    `before` cached ones: slots, q_starts by row; seq_lens, alive, block_tables by slot; positions, token_slots.

    tokens: of the step, padding included. dead: numbers of rows. Slots and pages are in no order; page 0 is padding,
    and there are block_tables.max() + 1 pages. Slots that no row has hold lengths that would show.
    """
    count = len(lengths)
    slots = rng.permutation(np.arange(1, count + 3))[:count].astype(np.int32)
    width = max(n + b for n, b in zip(lengths, before, strict=True)) // page_size + 1
    tables = np.zeros((count + 3, width), np.int32)
    tables[slots] = 1 + rng.permutation(count * width).reshape(count, width)
    seq_lens, alive = np.full(count + 3, 10**6, np.int32), np.zeros(count + 3, np.int32)
    seq_lens[slots], alive[slots] = before, [row not in dead for row in range(count)]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions, token_slots = (np.zeros(tokens or sum(lengths), np.int32) for _ in range(2))
    for row, slot in enumerate(slots):
        own = slice(starts[row], starts[row + 1])
        positions[own] = before[row] + np.arange(lengths[row])
        token_slots[own] = slot if alive[slot] else 0
    return {
        "positions": positions, "token_slots": token_slots, "slots": slots, "q_starts": starts,
        "seq_lens": seq_lens, "alive": alive, "block_tables": tables,
    }  # fmt: skip


def paged_places(
    rows: Mapping[str, Array], counts: Sequence[int], page_size: int
) -> Iterator[tuple[int, int]]:
    """The page of a token, and its place there, for the first `counts` tokens of each row of `paged_rows`."""
    for slot, count in zip(rows["slots"], counts, strict=True):
        for position in range(count):
            yield rows["block_tables"][slot, position // page_size], position % page_size


def workspace(op: Op[Any], args: Mapping[str, Any], target: Target) -> tuple[int, int]:
    """Bytes of ordinary and of zeroed scratch that a call needs."""
    plan = NullPack(target)
    op(plan, **args)
    return plan.workspace_bytes(zeroed=False), plan.workspace_bytes(zeroed=True)


def run_reference(op: Op[Any], args: Mapping[str, Any]) -> Arrays:
    """The arrays of a call after its reference has run, which changes only what the op says. `args` has numpy arrays
    for tensors; they are not changed."""
    arrays, tensors = copied(args)
    op(CpuPack(batch_invariant=True), **tensors)
    written = op.written(op.args(**tensors))
    for name, before in leaves(args, np.ndarray):
        kept = arrays[name].tobytes() == before.tobytes()
        address = arrays[name].__array_interface__["data"][0]
        assert kept or address in {t.ptr for t in written}, f"{op.name} does not say that it writes {name}"
    return arrays


def run_interpreted(op: Op[Any], args: Mapping[str, Any], target: Target = INTERPRETED) -> Arrays:
    """Like run_reference, by the op's kernels in Triton's interpreter. Scratch begins as 0xFF bytes."""
    arrays, tensors = copied(args)
    plain, zeroed = workspace(op, tensors, target)
    scratch, zeros = np.full(plain + _MARGIN, 0xFF, np.uint8), np.zeros(zeroed + _MARGIN, np.uint8)
    pack = LaunchPack(target, InterpDriver(), Tensor.from_numpy(scratch), Tensor.from_numpy(zeros))
    op(pack, **tensors)
    _check_scratch(op, scratch[plain:], zeros)
    return arrays


def run_on_gpu(
    op: Op[Any], args: Mapping[str, Any], target: Target, driver: CudaDriver, stream: Stream
) -> Arrays:
    """Like run_reference, by the op's kernels on the GPU of `stream`, compiled first if `driver.store` lacks them."""
    sent: dict[int, tuple[Tensor, Tensor, Array]] = {}

    def upload(array: Array) -> Tensor:
        if id(array) not in sent:
            sent[id(array)] = (*_upload(array, stream), array)
        return sent[id(array)][1]

    tensors = mapped(args, np.ndarray, upload)
    plan = NullPack(target)
    op(plan, **tensors)
    driver.store.prepare(plan.specs())
    plain, zeroed = (plan.workspace_bytes(zeroed=z) for z in (False, True))
    scratch, zeros = (Tensor.empty((n + _MARGIN,), uint8, stream.device) for n in (plain, zeroed))
    scratch.copy_from(np.full(plain + _MARGIN, 0xFF, np.uint8), stream)
    zeros.zero_(stream)
    op(LaunchPack(target, driver, scratch, zeros), **tensors)
    stream.synchronize()
    _check_scratch(op, scratch.numpy()[plain:], zeros.numpy())
    strided = np.lib.stride_tricks.as_strided
    return {
        name: strided(sent[id(array)][0].numpy(), array.shape, array.strides)
        for name, array in leaves(args, np.ndarray)
    }


def compare(op: Op[Any], got: Arrays, want: Arrays, outputs: Mapping[str, float]) -> None:
    """Raise AssertionError unless `got` is `want`: outputs within the relative error given (0: bit for bit), all other
    arrays bit for bit."""
    for name, array in want.items():
        limit = outputs.get(name, 0.0)
        if limit == 0.0:
            np.testing.assert_array_equal(got[name], array, err_msg=f"{op.name}: {name}")
        else:
            found = error(got[name], array)
            assert found <= limit, f"{op.name}: {name} is off by {found:.2e}, allowed {limit:.2e}"


def _like(array: Array) -> Array:
    """A copy with the same strides. The gaps between elements are 7; gaps of gigabytes are untouched memory."""
    span = 1 + sum((n - 1) * s // array.itemsize for n, s in zip(array.shape, array.strides, strict=True))
    flat = np.full(span, 7, array.dtype) if span < 1 << 28 else np.zeros(span, array.dtype)
    copy = np.lib.stride_tricks.as_strided(flat, array.shape, array.strides)
    copy[...] = array
    return copy


def copied(args: Mapping[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """Copies of a call's arrays with their strides, and the call's arguments with tensors over the copies. An array
    that is there twice has one copy."""
    copies: dict[int, Array] = {}

    def like(array: Array) -> Array:
        return copies.setdefault(id(array), _like(array))

    made = mapped(args, np.ndarray, like)
    return dict(leaves(made, np.ndarray)), mapped(made, np.ndarray, Tensor.from_numpy)


def _upload(array: Array, stream: Stream) -> tuple[Tensor, Tensor]:
    """Device memory that spans the array, and the tensor with the array's strides in it."""
    strides = tuple(s // array.itemsize for s in array.strides)
    span = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True))
    flat = np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,)).copy()
    memory = Tensor.empty((span,), array.dtype, stream.device)
    memory.copy_from(flat, stream)
    stream.synchronize()
    return memory, Tensor(memory.ptr, array.shape, memory.dtype, stream.device, strides, memory)


def _check_scratch(op: Op[Any], margin: Array, zeros: Array) -> None:
    assert not zeros.any(), f"{op.name} left its zeroed scratch dirty"
    assert (margin == 0xFF).all(), f"{op.name} wrote past its scratch"


def _replaced(old: Array, new: Array, array: Array) -> Array:
    return new if array is old else array


@dataclass(frozen=True)
class Case:
    """A call for OpConformance. `args`: arrays and values; fill pure outputs with NaN or -1. `outputs`: the arrays that
    are written, each with the relative error allowed between kernels and reference (0: bit for bit)."""

    args: Mapping[str, Any]
    outputs: Mapping[str, float] = field(default_factory=dict)


class OpConformance:
    """The properties of every op. Subclass it in a test module with `op` and `cases`; pytest collects the methods."""

    op: Op[Any]
    cases: Sequence[Case]
    arch = 90

    def test_the_contract_refuses_other_dtypes_and_shapes(self) -> None:
        """Each array of a call in turn, as int16 and with one more axis."""
        for case in self.cases:
            for name, array in leaves(case.args, np.ndarray):
                for wrong in (np.zeros(array.shape, np.int16), np.zeros((*array.shape, 1), array.dtype)):
                    changed = mapped(case.args, np.ndarray, functools.partial(_replaced, array, wrong))
                    _, tensors = copied(changed)
                    try:
                        self.op.check(self.op.args(**tensors))
                    except ContractError:
                        continue
                    raise AssertionError(f"{self.op.name} takes {name} as {wrong.dtype} {wrong.shape}")

    def test_the_reference_writes_its_outputs_alone_and_the_same_bits_each_time(self) -> None:
        for case in self.cases:
            first, second = run_reference(self.op, case.args), run_reference(self.op, case.args)
            before = dict(leaves(case.args, np.ndarray))
            for name, array in first.items():
                np.testing.assert_array_equal(array, second[name], err_msg=f"{self.op.name}: {name}")
                if name not in case.outputs:
                    np.testing.assert_array_equal(array, before[name], err_msg=f"{self.op.name}: {name}")

    def test_kernels_in_the_interpreter_agree_with_the_reference(self) -> None:
        for case in self.cases:
            want = run_reference(self.op, case.args)
            compare(self.op, run_interpreted(self.op, case.args), want, case.outputs)

    def test_kernels_compile(self, tmp_path: Path) -> None:
        """For sm_90 by default; needs no GPU."""
        plan = NullPack(Target(self.arch, 132))
        for case in self.cases:
            self.op(plan, **copied(case.args)[1])
        store = Store(self.arch, tmp_path, folders=[])
        assert store.prepare(plan.specs()).compiled == len(plan.specs())

    def test_costs_are_numbers_of_bytes_and_operations(self) -> None:
        for case in self.cases:
            _, tensors = copied(case.args)
            little, much = (self.op.cost(Workload(n, 1, n, n), self.op.args(**tensors)) for n in (1, 64))
            for cost in (little, much):
                assert isinstance(cost.bytes, int)
                assert isinstance(cost.flops, int)
                assert cost.bytes > 0
                assert cost.flops >= 0
            assert much.bytes >= little.bytes
            assert much.flops >= little.flops


class HostPeers(InterpDriver):
    """A driver of the interpreter for kernels that push to other ranks, which are processes of this host.

    All ranks give a descriptor of one file (os.memfd_create). width: bytes of a row. Plan for a Target with the rank
    and without `interpreted`. The interpreter has no inline assembly, so the accesses of 16 bytes of device.push_sum
    become numpy's: make the driver before any other module imports them. RankLost where a word does not come within
    `timeout_s`. clears=False: slots that were read keep their words, which is a fault for controls.
    """

    def __init__(
        self, file: int, rank: int, size: int, width: int, *, timeout_s: float = 20.0, clears: bool = True
    ) -> None:
        super().__init__()
        segment = segment_bytes(size, width)
        os.ftruncate(file, size * segment)
        memory, self._lost = np.frombuffer(mmap.mmap(file, 0), np.uint8), np.zeros(4, np.int32)
        self._width, self._timeout_s, self._clears, self._memory = width, timeout_s, clears, memory
        addresses = [memory.ctypes.data + rank * segment for rank in range(size)]
        self._table = table_of(addresses, self._lost.ctypes.data)
        device: Any = importlib.import_module("openinfer.kernels.device.push_sum")
        device.load16, device.store16, device.arrived = self._load, self._send, self._arrived
        device.peek16, device.put16 = self._load, self._store
        device.packed = self._packed
        for waiting in (device, importlib.import_module("openinfer.kernels.device.norm")):
            vars(waiting).update(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)  # none is ahead

    def peers(self, table: PeerTable) -> int:
        assert table.width in (None, self._width), (
            f"rows of {table.width} bytes; the segments are for {self._width}"
        )
        return int(self._table.ctypes.data)

    def _words(self, address: Any, inside: Any) -> Array:
        found = np.zeros((4, inside.handle.data.size), np.int32)
        for lane in np.flatnonzero(inside.handle.data):
            found[:, lane] = np.frombuffer(ctypes.string_at(int(address.handle.data[lane]), 16), np.int32)
        return found

    def _packed(self, first: Any, second: Any) -> Any:
        import triton.language as tl

        low, high = (one.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32) for one in (first, second))
        return (low | (high << 16)).to(tl.int32, bitcast=True)

    def _load(self, address: Any, inside: Any) -> tuple[Any, ...]:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        words = self._words(address, inside)
        block = tl.block_type(tl.int32, [words.shape[1]])
        return tuple(tl.tensor(TensorHandle(row.copy(), tl.int32), block) for row in words)

    def _send(self, address: Any, inside: Any, *words: Any) -> None:
        if self._clears or any(word.handle.data.any() for word in words):
            self._store(address, inside, *words)

    def _store(self, address: Any, inside: Any, *words: Any) -> None:
        rows = np.stack([word.handle.data for word in words]).astype(np.int32)
        for lane in np.flatnonzero(inside.handle.data):
            ctypes.memmove(int(address.handle.data[lane]), rows[:, lane].tobytes(), 16)

    def _arrived(self, address: Any, lost: Any, inside: Any, *seen: Any) -> tuple[Any, ...]:
        if all(word.handle.data[inside.handle.data != 0].all() for word in seen):
            return seen
        deadline = time.monotonic() + self._timeout_s
        while not self._words(address, inside)[:, inside.handle.data != 0].all():
            if time.monotonic() > deadline:
                raise RankLost("a word of another rank did not come")
            time.sleep(1e-4)  # the other ranks may need this core
        return self._load(address, inside)


def of_the_day(values: Sequence[Any], count: int = 1) -> list[Any]:
    """Parameters of a test that takes long: `count` of them, chosen by the date, run always; others are marked slow."""
    import pytest

    first, day = datetime.date.today().toordinal() * count, []
    for number, value in enumerate(values):
        marks = () if (number - first) % len(values) < count else pytest.mark.slow
        day.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return day
