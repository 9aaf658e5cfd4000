"""add_lora: kernels against the reference, and the reference against merged weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import ContractError, CpuPack, Target, add_lora
from openinfer.kernels.lora.low_rank import Lora
from openinfer.kernels.op.reference import rms_norm
from openinfer.kernels.testing import Case, OpConformance, compare, copied, run_interpreted, run_reference
from openinfer.tensor import bfloat16, float32

RNG = np.random.default_rng(0)


def call(
    tokens: int, columns: int, parts: tuple[int, ...], ids: Any, *, rank: int = 16, places: int = 3, norm: bool = False,
    add: bool = True, dtype: Any = bfloat16, wide: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a call. ids: adapters of slots 1, 2, ... which the tokens take in turn. wide: more columns of out.
    The matrices of an adapter lie together, so those of the next begin at another stride."""

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return (RNG.standard_normal(shape) * scale).astype(dtype)

    rows, width = len(parts) * rank, sum(parts)
    matrices = normal(places, rows * columns + width * rank, scale=0.2)
    a = matrices[:, : rows * columns].reshape(places, rows, columns)
    b = matrices[:, rows * columns :].reshape(places, width, rank)
    slots = np.arange(tokens, dtype=np.int32) % len(ids) + 1
    normed = {"norm_weight": normal(columns), "eps": 1e-6} if norm else {}
    out = normal(tokens, width + wide)[:, :width]
    return {
        "out": out if add else np.full_like(out, np.nan),
        "x": normal(tokens, columns),
        "lora": Lora(a, b, parts, np.array([0, *ids], np.int32), slots),
        "add": add,
        **normed,
    }


class TestAddLora(OpConformance):
    op = add_lora
    cases = (
        Case(call(1, 192, (80,), [2]), {"out": 8e-3}),
        Case(call(37, 144, (96, 96), [0, 2, 1], add=False, norm=True), {"out": 8e-3}),
        Case(call(150, 128, (32, 16), [1, 0, 2], rank=32), {"out": 8e-3}),
    )


class TestAddLoraOfOtherSizes(OpConformance):
    """The same kernels with other constants, which are compiled in the slow tests."""

    op = add_lora
    cases = (
        Case(call(21, 208, (48, 32, 32), [3, 0, 1, 2, 0], norm=True, wide=16), {"out": 8e-3}),
        Case(call(9, 1200, (200, 72, 16, 40), [1, 0], rank=64), {"out": 8e-3}),
        Case(call(40, 128, (48, 32), [5, 0, 30, 1], places=30, norm=True), {"out": 8e-3}),
        Case(call(20, 4112, (272,), [1, 3], rank=32), {"out": 8e-3}),
    )

    @pytest.mark.slow
    def test_kernels_compile(self, tmp_path: Path) -> None:
        super().test_kernels_compile(tmp_path)


def test_a_step_of_many_tokens_and_one_that_must_not_depend_on_their_number() -> None:
    args = call(140, 256, (64, 32), [1, 2, 0], places=2)
    want = run_reference(add_lora, args)
    fixed = Target(arch=90, num_sms=4, interpreted=True, batch_invariant=True)
    compare(add_lora, run_interpreted(add_lora, args, fixed), want, {"out": 8e-3})


@pytest.mark.parametrize("norm", [False, True])
def test_it_is_the_difference_that_merged_weights_make(norm: bool) -> None:
    args = call(11, 64, (48, 16), [2, 0, 1], norm=norm, dtype=float32)
    got = run_reference(add_lora, args)["out"]
    own = args["lora"]
    ids = own.adapters[own.token_slots]
    h = rms_norm(args["x"], args["norm_weight"], 1e-6) if norm else args["x"]
    for token, adapter in enumerate(ids):
        change = np.zeros(64, np.float32)
        if adapter:
            a, b = own.a[adapter - 1], own.b[adapter - 1]
            change = np.concatenate([b[:48] @ a[:16], b[48:] @ a[16:]]) @ h[token]
        np.testing.assert_allclose(got[token], args["out"][token] + change, rtol=2e-4, atol=2e-4)


def test_rows_do_not_depend_on_their_company() -> None:
    args = call(24, 96, (32,), [1, 2, 3], dtype=float32)
    whole = run_reference(add_lora, args)["out"]
    for token in (0, 7, 23):
        alone = {n: args[n][token : token + 1] for n in ("out", "x")}
        alone["lora"] = replace(args["lora"], token_slots=args["lora"].token_slots[token : token + 1])
        np.testing.assert_array_equal(run_reference(add_lora, {**args, **alone})["out"][0], whole[token])


def test_the_wrong_adapter_would_be_noticed() -> None:
    """Negative control: with two adapters swapped the result is another."""
    args = call(8, 64, (32,), [1, 2])
    swapped = {**args, "lora": replace(args["lora"], adapters=np.array([0, 2, 1], np.int32))}
    with pytest.raises(AssertionError, match="out is off by"):
        compare(add_lora, run_interpreted(add_lora, swapped), run_reference(add_lora, args), {"out": 8e-3})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"parts": (16, 16, 16, 16, 16)}, "1 to 4"),
        ({"parts": (64, 32)}, "parts of rank 16 were given"),
        ({"eps": 1e-6}, "come together"),
        ({"b": np.zeros((3, 96, 24), bfloat16)}, "power of two"),
    ],
)
def test_what_the_contract_refuses(change: dict[str, Any], why: str) -> None:
    args, parts = call(3, 64, (96,), [1]), change.get("parts", (96,))
    own = replace(args["lora"], b=np.zeros((3, sum(parts), 16), bfloat16))
    args |= change if "eps" in change else {"lora": replace(own, **change)}
    with pytest.raises(ContractError, match=why):
        add_lora(CpuPack(), **copied(args)[1])
