"""What the op tests share. Fixtures, because test modules cannot import each other."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; compile workers drop it

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import CpuPack, CudaDriver, InterpDriver, LaunchPack, NullPack, Op, Store, Target
from openinfer.sampler.gpu import Adjustment, sample
from openinfer.sampler.gpu.ops.adjustments import adjust_row, adjustment_fields, adjustment_values
from openinfer.sampler.noise import gumbel, hash_u32
from openinfer.sampler.reference import choose_tokens, without
from openinfer.tensor import Device, Stream, Tensor, TensorError

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
RunOp = Callable[..., Arrays]

SMALL_GPU = Target(arch=90, num_sms=4, interpreted=True)


def _copies(args: Mapping[str, Array | int]) -> tuple[Arrays, dict[str, Tensor | int]]:
    """Copies of the arrays, and the op's arguments on them. Numbers stay numbers."""
    got = {name: value.copy() for name, value in args.items() if not isinstance(value, int)}
    numbers = {name: value for name, value in args.items() if isinstance(value, int)}
    return got, {**numbers, **{name: Tensor.from_numpy(array) for name, array in got.items()}}


def _run_cpu(op: Op[Any], **args: Array | int) -> Arrays:
    got, tensors = _copies(args)
    op(CpuPack(), **tensors)
    return got


def _run_interpreter(op: Op[Any], **args: Array | int) -> Arrays:
    got, tensors = _copies(args)
    plan = NullPack(SMALL_GPU)
    op(plan, **tensors)
    size = plan.workspace_bytes(zeroed=False)
    scratch = np.full(size + 256, 0xFF, np.uint8)  # NaN, and ids out of range
    op(LaunchPack(SMALL_GPU, InterpDriver(), Tensor.from_numpy(scratch), None), **tensors)
    assert (scratch[size:] == 0xFF).all(), f"{op.name} wrote past its scratch"
    return got


@pytest.fixture
def run_cpu() -> RunOp:
    """run_cpu(op, **arrays): copies of the arrays, as the reference left them."""
    return _run_cpu


@pytest.fixture
def run_interpreter() -> RunOp:
    """run_interpreter(op, **arrays): copies of the arrays, as the kernels left them."""
    return _run_interpreter


@pytest.fixture(scope="session")
def gpu() -> Iterator[tuple[Target, CudaDriver, Device, Stream]]:
    """A CUDA device with a driver; skips without one."""
    device = Device("cuda", 0)
    try:
        device.activate()
    except TensorError as e:
        pytest.skip(f"no usable CUDA device: {e}")
    with Stream(device) as stream:
        yield Target.of(device, cublas=False), CudaDriver(device, stream, Store(device.arch)), device, stream
        stream.synchronize()


@pytest.fixture
def run_gpu(gpu: tuple[Target, CudaDriver, Device, Stream]) -> RunOp:
    """run_gpu(op, **arrays): copies of the arrays, as the kernels left them on a real device."""
    target, driver, device, stream = gpu

    def run(op: Op[Any], **args: Array) -> Arrays:
        tensors = {name: Tensor.empty(array.shape, array.dtype, device) for name, array in args.items()}
        for name, array in args.items():
            tensors[name].copy_from(array)
        plan = NullPack(target)
        op(plan, **tensors)
        scratch = Tensor.empty((plan.workspace_bytes(zeroed=False) + 256,), np.dtype(np.uint8), device)
        scratch.copy_from(np.full(scratch.shape, 0xFF, np.uint8))
        op(LaunchPack(target, driver, scratch, None), **tensors)
        stream.synchronize()
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    return run


@pytest.fixture
def step(request: pytest.FixtureRequest) -> Callable[..., Arrays]:
    """step(logits, **by_row): arguments of `sample` for a step in which row r is the sequence in slot R - r.

    by_row: temperatures, top_ks, ... one value for all rows or one a row; stop_ids [R, W]. adjustments: of each row
    None or (params, prompt, output), which also make its position. Slots that no row uses, and what a row does not
    write, hold values that would show.
    """
    rng = np.random.default_rng(list(request.node.name.encode()))

    def make(logits: Array, **by_row: Any) -> Arrays:
        rows = len(logits)
        slots = np.arange(rows, 0, -1, dtype=np.int32)
        columns = {
            "seq_lens": rng.integers(0, 99, rows),
            "alive": 1,
            "temperatures": np.float32(1),
            "top_ks": 0,
            "top_ps": np.float32(1),
            "min_ps": np.float32(0),
            "seeds": rng.integers(-(2**31), 2**31, (rows, 2)),
            "min_lens": 0,
            "stop_ids": np.full((rows, 1), -1),
        }
        emits, adjustments = by_row.pop("emits", 1), by_row.pop("adjustments", [])
        assert by_row.keys() <= columns.keys()
        args = {
            "tokens": np.full(rows, -7, np.int32),
            "logprobs": np.full(rows, np.nan, np.float32),
            "logits": logits,
            "slots": slots,
            "q_starts": np.concatenate([[0], rng.integers(1, 4, rows)]).cumsum().astype(np.int32),
            "emits": np.broadcast_to(np.asarray(emits, np.int32), rows).copy(),
        }
        for name, value in (columns | by_row).items():
            value = np.asarray(value)
            dtype = np.float32 if name in ("temperatures", "top_ps", "min_ps") else np.int32
            by_slot = np.ones((rows + 2, *value.shape[1:]), dtype)
            by_slot[slots] = value
            args[name] = by_slot
        args["alive"][0] = 0
        for field in adjustment_fields(logits.shape[1]):
            words = rng.integers(-(2**31), 2**31, (rows + 2, *field.shape)).astype(np.int32)
            args[field.name] = words if field.dtype == np.int32 else words.astype(np.float32)
        args["adjusts"][:] = 15
        args["adjusts"][slots] = 0
        for r, adjustment in enumerate(adjustments):
            if adjustment is not None:
                params, prompt, output = adjustment
                values = adjustment_values(params, prompt, output, logits.shape[1])
                for name, value in values.items():
                    args[name][slots[r]] = value
                q_len = args["q_starts"][r + 1] - args["q_starts"][r]
                args["seq_lens"][slots[r]] = len(prompt) + len(output) - q_len
        return args

    return make


def _reference_tokens(args: Arrays, scale: float) -> tuple[Array, Array]:
    """The reference's tokens with every top_p scaled, and what it compares: scaled logits plus noise."""
    slot, logits = args["slots"], args["logits"]
    position = (args["seq_lens"][slot] + np.diff(args["q_starts"])).astype(np.int32)
    temperature, seeds = args["temperatures"][slot], args["seeds"][slot].view(np.uint32)
    stop_ids = args["stop_ids"][slot]
    early = (position < args["min_lens"][slot])[:, None] & (stop_ids < logits.shape[1])
    allowed = without(logits, np.where(early, stop_ids, -1))
    state = sample.args(**{name: array.copy() for name, array in args.items()})  # counts are cleared in it
    for r in np.flatnonzero((args["adjusts"][slot] != 0) & (args["alive"][slot] != 0)):
        adjust_row(allowed[r], Adjustment(int(args["adjusts"][slot[r]])), position[r], state, slot[r])
    top_p = args["top_ps"][slot]
    top_p = np.where(top_p < 1, top_p * np.float32(scale), top_p)
    tokens, unsound = choose_tokens(
        logits, allowed, temperature, args["top_ks"][slot], top_p, args["min_ps"][slot], seeds, position
    )
    columns = [c[:, None].astype(np.uint32) for c in (seeds[:, 0], seeds[:, 1], position)]
    noise = gumbel(hash_u32(*columns, np.arange(logits.shape[1], dtype=np.uint32)[None]))
    tokens = np.where((args["emits"] != 0) & (args["alive"][slot] != 0), np.where(unsound, -2, tokens), -1)
    return tokens, allowed / np.maximum(temperature, np.float32(1e-5))[:, None] + noise


@pytest.fixture
def check_tokens() -> Callable[[Arrays, Array], int]:
    """check_tokens(args, tokens): fails unless they are the reference's, but for what fp32 rounding explains.

    Excused, and counted in the result: two candidates whose perturbed logits are within 1e-4, and a mass within 1e-5
    of top_p.
    """

    def check(args: Arrays, tokens: Array) -> int:
        want, values = _reference_tokens(args, 1.0)
        wrong = np.flatnonzero(tokens != want)
        if not len(wrong):
            return 0
        near = [_reference_tokens(args, scale)[0] for scale in (1 - 1e-5, 1 + 1e-5)]
        for r in wrong:
            excused = tokens[r] >= 0 and (
                any(tokens[r] == other[r] for other in near)
                or abs(values[r, tokens[r]] - values[r, want[r]]) < 1e-4
            )
            assert excused, f"row {r}: token {tokens[r]}, the reference draws {want[r]}"
        return len(wrong)

    return check


@pytest.fixture
def byte_tokenizer():
    """Makes the JSON of a byte-level BPE: special tokens, the 256 bytes in order, what its merges ("p r") make."""

    def make(special, merges=()):
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        codes = dict(zip(others, range(256, 256 + len(others)), strict=True))
        letters = [chr(codes.get(byte, byte)) for byte in range(256)]
        texts = [*special, *letters, *(merge.replace(" ", "") for merge in merges)]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        added = [
            {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
            for i, text in enumerate(special)
        ]
        model = {"type": "BPE", "vocab": {text: i for i, text in enumerate(texts)}, "merges": list(merges)}
        return json.dumps(
            {
                "version": "1.0",
                "added_tokens": added,
                "pre_tokenizer": level,
                "decoder": level,
                "model": model,
            }
        )

    return make
