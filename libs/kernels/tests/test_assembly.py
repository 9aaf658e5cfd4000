"""Assembly in kernels, which the interpreter does not run, against Triton code: line by line in numpy."""

import operator
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from openinfer.kernels.device.attention import WIDE
from openinfer.kernels.device.fp4 import CODES as FP4_CODES
from openinfer.kernels.device.int4 import CODES
from openinfer.kernels.formats.fp4 import fp4_pairs
from openinfer.kernels.op.rounding import FP4_VALUES

U32 = np.uint32
RNG = np.random.default_rng(0)


def pairs(operation: Any, a: Any, b: Any) -> Any:
    """An operation on pairs of bf16, rounded."""
    left, right = (np.asarray(x, U32).view(ml_dtypes.bfloat16).astype(np.float32) for x in (a, b))
    return operation(left, right).astype(ml_dtypes.bfloat16).view(U32)


def prmt(a: Any, b: Any, selector: int) -> Any:
    """Four bytes, chosen from the eight of two words."""
    both = np.concatenate([a[:, None].view(np.uint8), b[:, None].view(np.uint8)], axis=1)
    return np.ascontiguousarray(both[:, [selector >> 4 * i & 7 for i in range(4)]]).view(U32)[:, 0]


def run(text: Any, outputs: int, *inputs: Any) -> list[Any]:
    """The outputs of a piece of assembly for these values of its other operands: words [N], or numbers. An output that
    takes half of a word is the number with these bits."""
    known: dict[str, Any] = {f"${outputs + n}": value for n, value in enumerate(inputs)}
    count = next(len(x) for x in inputs if isinstance(x, np.ndarray))

    def value(word: str) -> Any:
        found = known[word] if word in known else int(word, 0)
        return found if isinstance(found, np.ndarray) else np.full(count, found, U32)

    for line in re.sub(r"[{}]\s*\n|\n[{}]|^{|}$", "\n", str(getattr(text, "value", text))).split(";"):
        match = re.match(r"\s*([a-z0-9.]+) (.*)", line.strip(), re.S)
        if match is None or match[1] == ".reg":
            continue
        name, words = match[1], [w.strip() for w in re.findall(r"\{[^}]*\}|[^,]+", match[2])]
        to, *operands = words
        kind, args = name.split(".")[0], operands
        if kind == "mov" and to.startswith("{"):
            low, high = (w.strip() for w in to[1:-1].split(","))
            known[low], known[high] = value(args[0]) & 0xFFFF, value(args[0]) >> 16
        elif kind == "mov":
            known[to] = value(args[0])
        elif kind == "prmt":
            known[to] = prmt(value(args[0]), value(args[1]), int(value(args[2])[0]))
        elif kind == "lop3":
            assert args[3] == "0xEA"
            known[to] = (value(args[0]) & value(args[1])) | value(args[2])
        elif name == "mul.lo.u32":
            known[to] = value(args[0]) * value(args[1])
        elif kind == "mad":
            known[to] = value(args[0]) * value(args[1]) + value(args[2])
        elif kind in ("mul", "sub"):
            known[to] = pairs(getattr(operator, kind), value(args[0]), value(args[1]))
        else:
            known[to] = {"shr": operator.rshift, "shl": operator.lshift, "and": operator.and_}[kind](
                value(args[0]), value(args[1])
            )
    return [known[f"${n}"] for n in range(outputs)]


@pytest.mark.parametrize("half", [0, 1])
def test_int4_codes_less_their_zero_point(half: int) -> None:
    words, zeros = RNG.integers(0, 1 << 32, 4096, U32), RNG.integers(0, 16, 4096, U32)
    found = run(CODES, 4, words, (zeros | 0x4300) * U32(0x10001), 0x4342 if half else 0x4140)
    for output, shift in zip(found, (0, 4, 8, 12), strict=True):
        code = words >> U32(16 * half + shift) & U32(15)
        number = output.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.int32)
        np.testing.assert_array_equal(number, code.astype(np.int32) - zeros.astype(np.int32))


@pytest.mark.parametrize("half", [0, 1])
def test_fp4_codes_times_their_scales(half: int) -> None:
    words = RNG.integers(0, 1 << 32, 4096, U32)
    scales = RNG.integers(0, 256, (2, 4096)).astype(np.uint32)
    placed = fp4_pairs(words.view(np.uint8)).view(U32)
    found = run(FP4_CODES, 4, placed, scales[0] | scales[1] << U32(8), 0x4432 if half else 0x4410)
    for output, shift in zip(found, (0, 4, 8, 12), strict=True):
        code = words >> U32(16 * half + shift) & U32(15)
        byte = scales[shift // 4 % 2].astype(np.int64)
        scale = (1 + byte % 8 / 8) * 2.0 ** (byte // 8 - 30)
        number = output.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
        np.testing.assert_array_equal(number, (FP4_VALUES[code] * scale).astype(ml_dtypes.bfloat16))


def test_fp8_codes_of_a_cache() -> None:
    codes = np.array([code for code in range(256) if code & 127 != 127] * 2, np.uint8)[:508]
    found = np.stack(run(WIDE, 2, codes.view(U32)), axis=1).view(ml_dtypes.bfloat16)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(found.astype(np.float32).reshape(-1), want)
