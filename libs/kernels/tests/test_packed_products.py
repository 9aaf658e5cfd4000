"""Products with packed weights, clamped gates and norms, in Triton's interpreter and on a GPU, against references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import H200, ContractError, InterpDriver, LaunchPack, Matmul, NullPack, Store, Target
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.moe import packed as mixture
from openinfer.kernels.op.coded import Coded
from openinfer.kernels.ops.project import code_rows, gate_up_clamped, norm_rows, project
from openinfer.kernels.testing import INTERPRETED, codes_of, copied, error, never_coded, values_in
from openinfer.tensor import Device, Tensor, bfloat16, float8_e4m3fn, float32, uint8

Array = np.ndarray[Any, Any]
Both = Callable[..., tuple[dict[str, Array], dict[str, Array]]]
"""both(op, args, target): what the kernels and the reference leave (conftest.py)."""
Run = Callable[..., dict[str, Array]]
LIMIT = 1.5
"""Of the gated product: small enough that many values are cut off."""


def packed(rng: np.random.Generator, shape: tuple[int, ...], kind: int) -> tuple[Array, Array | None]:
    """A weight [..., N, K] of every number of its format, worth about K^-0.5, and its scales."""
    *lead, n, k = shape
    if kind == mixture.BF16:
        return (rng.standard_normal(shape) * k**-0.5).astype(bfloat16), None
    if kind == mixture.FP4:
        weight = rng.integers(0, 256, (*lead, n, k // 2), np.uint8)
        return weight, rng.integers(118, 124, (*lead, n, k // 32), np.uint8)
    codes = rng.integers(0, 256, shape, np.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    return codes.view(float8_e4m3fn), rng.integers(117, 120, (*lead, -(-n // 128), -(-k // 128)), np.uint8)


KINDS = {"bf16": mixture.BF16, "float8": mixture.FLOAT8}


def layer(
    rng: np.random.Generator,
    tokens: int,
    n: int,
    k: int,
    kind: str,
    groups: int = 1,
    *,
    codes: bool = False,
) -> dict[str, Any]:
    """Arguments of `project`; x is columns of something wider, or codes."""
    weight, scales = packed(rng, (n, k), KINDS[kind])
    wide = rng.standard_normal((tokens, groups * k + 64), np.float32)
    return {
        "out": np.full((tokens, n), np.nan, bfloat16),
        "x": codes_of(wide[:, :k]) if codes else wide.astype(bfloat16)[:, : groups * k],
        "weight": Linear(weight, scales),
        "groups": groups,
    }


HELD = [
    ("codes", 1536, 4096, 1, 4), ("codes", 8192, 1024, 1, 4), ("codes", 4096, 512, 1, 4),
    ("float8", 2048, 4096, 2, 8), ("bf16", 64, 256, 1, 0), ("bf16", 256, 4096, 1, 0),
]  # fmt: skip
"""kind, n, k, groups, and how many tiles of a weight few tokens hold."""


def launched(arena: Any, kind: str, n: int, k: int, groups: int, tokens: int) -> Any:
    """The specification of a product's kernel."""
    pack, packed_kind = NullPack(H200), kind != "bf16"
    x = arena.alloc((tokens, groups * k), bfloat16)
    weight = arena.alloc((n, k), float8_e4m3fn if packed_kind else bfloat16)
    scales = arena.alloc((n // 128, k // 128), uint8) if packed_kind else None
    of_x = Coded.allocate(arena, (tokens, k), bfloat16) if kind == "codes" else x
    out = arena.alloc((tokens, n), bfloat16)
    project(pack, out=out, x=of_x, weight=Linear(weight, scales), groups=groups)
    ((command,),) = (call.commands for call in pack.calls)
    return command.spec


@pytest.mark.parametrize(("kind", "n", "k", "groups", "held"), HELD)
def test_which_products_hold_a_weight(arena: Any, kind: str, n: int, k: int, groups: int, held: int) -> None:
    for tokens, turns in ((1, held), (16, held), (17, 0)):
        assert dict(launched(arena, kind, n, k, groups, tokens).constants)["HELD"] == turns


@pytest.mark.parametrize(
    ("kind", "n", "k", "groups", "held"),
    # By default one of each kind, because those with other sizes differ in constants alone.
    [one if n in (0, 3, 4) else pytest.param(*one, marks=pytest.mark.slow) for n, one in enumerate(HELD)],
)
def test_few_tokens_hold_a_weight_before_the_wait(
    arena: Any, cubins: Any, cuobjdump: Any, resources: Any, kind: str, n: int, k: int, groups: int, held: int
) -> None:
    spec, store = launched(arena, kind, n, k, groups, 1), Store(90, cubins, folders=[])
    store.prepare([spec])
    cubin = store.get(spec).cubin
    before, _ = cuobjdump(cubin, "-sass").split("ACQBULK", 1)
    assert ("LDG" in before) == (held > 0)
    assert resources(cubin)["LOCAL"] == resources(cubin)["STACK"] == 0


@pytest.mark.parametrize("kind", ["float8", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "n", "k", "groups"),
    [
        (1, 144, 512, 1),
        (3, 128, 192, 2),
        (40, 64, 128, 1),
        (70, 128, 128, 2),
        (1, 64, 2048, 1),
        (3, 256, 256, 1),
        (530, 288, 64, 2),
    ],
)
def test_project(
    reference: Run,
    run_both: Both,
    rng: np.random.Generator,
    kind: str,
    tokens: int,
    n: int,
    k: int,
    groups: int,
) -> None:
    args = layer(rng, tokens, n, k, kind, groups)
    got, want = run_both(project, args)
    assert error(got["out"], want["out"]) < 3e-3
    wide = args | {"out": np.full((tokens, n), np.nan, float32)}
    got, want = run_both(project, wide)
    assert error(got["out"], want["out"]) < 3e-6
    own = args["weight"]
    if own.scales is not None:
        other = reference(project, wide | {"weight": replace(own, scales=own.scales + np.uint8(1))})
        assert error(other["out"], want["out"]) > 0.1


@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [(1, 144, 512), (3, 256, 256), (20, 256, 128), (70, 128, 256), (3, 64, 4224), (600, 64, 128)],
)
def test_project_of_codes(
    reference: Run, run_both: Both, rng: np.random.Generator, tokens: int, n: int, k: int
) -> None:
    """Columns are shared among programs as far as they go round; Hopper's sums of codes have some 14 bits."""
    args = layer(rng, tokens, n, k, "float8", codes=True) | {"out": np.full((tokens, n), np.nan, float32)}
    got, want = run_both(project, args)
    assert error(got["out"], want["out"]) < 3e-4
    own = args["weight"]
    other = reference(project, args | {"weight": replace(own, scales=own.scales + np.uint8(1))})
    assert error(other["out"], want["out"]) > 0.1


class Multiplying(InterpDriver):
    """The interpreter, with cuBLASLt's products of codes."""

    def matmul(self, command: Matmul, operands: Sequence[int], workspace: int) -> None:
        own = zip(operands, command.operands, strict=True)
        out, x, weight, *scales = (Tensor(at, one.shape, one.dtype, Device("cpu")).numpy() for at, one in own)
        of_x, of_weight = (np.repeat(scale, 128, axis=0) for scale in scales)
        wide = weight.astype(float32) * np.repeat(of_weight, 128, axis=1)
        out[:] = x.astype(float32) * of_x.T @ wide.T


def test_scales_of_many_codes_are_turned_for_cublas(reference: Run, rng: np.random.Generator) -> None:
    args = layer(rng, 528, 128, 1024, "float8", codes=True)
    want = reference(project, args)["out"]
    arrays, tensors = copied(args)
    target, memory = replace(INTERPRETED, cublas=True), np.zeros(64 << 20, np.uint8)
    project(LaunchPack(target, Multiplying(), Tensor.from_numpy(memory), None), **tensors)
    assert error(arrays["out"], want) < 1e-3


@pytest.mark.parametrize("tokens", [2, 70, pytest.param(530, marks=pytest.mark.slow)])
def test_project_rounds_its_output(
    reference: Run, run_both: Both, rng: np.random.Generator, tokens: int
) -> None:
    args = layer(rng, tokens, 256, 128, "float8", 2)
    plain = reference(project, args)["out"]
    got, want = run_both(project, args | {"out": never_coded(tokens, 256)})
    assert error(values_in(got, "out"), values_in(want, "out")) < 4e-3
    assert error(plain, values_in(want, "out")) > 1e-2


@pytest.mark.parametrize(
    "target",
    [
        Target(arch=80, num_sms=4, interpreted=True),
        Target(arch=90, num_sms=4, batch_invariant=True, interpreted=True),
    ],
)
def test_project_elsewhere(run_both: Both, rng: np.random.Generator, target: Target) -> None:
    for tokens in (3, 70):
        got, want = run_both(project, layer(rng, tokens, 128, 192, "float8", 2), target)
        assert error(got["out"], want["out"]) < 3e-3
    codes = layer(rng, 3, 128, 384, "float8", codes=True)
    if target.arch < 89:
        with pytest.raises(ContractError, match="q8 is asked for on sm_80"):
            run_both(project, codes, target)
        target = replace(target, arch=89)
    for kind in KINDS:
        got, want = run_both(project, layer(rng, 70, 128, 384, kind, codes=True), target)
        assert error(got["out"], want["out"]) < 3e-3


@pytest.mark.parametrize("kind", ["float8", "bf16"])
@pytest.mark.parametrize(("tokens", "quantized"), [(1, True), (5, False), (70, True)])
def test_gate_up_clamped(
    reference: Run, run_both: Both, rng: np.random.Generator, kind: str, tokens: int, quantized: bool
) -> None:
    weight, scales = packed(rng, (256, 128), KINDS[kind])
    x = rng.standard_normal((tokens, 128), np.float32)
    args = {
        "out": never_coded(tokens, 128) if quantized else np.full((tokens, 128), np.nan, bfloat16),
        "x": codes_of(x) if quantized else x.astype(bfloat16),
        "weight": Linear(weight, scales),
        "limit": LIMIT,
    }
    got, want, other = (
        values_in(found, "out")
        for found in (
            *run_both(gate_up_clamped, args),
            reference(gate_up_clamped, args | {"limit": 1.2 * LIMIT}),
        )
    )
    assert error(got, want) < 6e-3
    assert error(other, want) > 1e-2


@pytest.mark.parametrize("columns", [64, 32])
@pytest.mark.parametrize("tokens", [3, 140])
def test_a_part_of_a_block_has_scales_of_its_own(
    run_both: Both, rng: np.random.Generator, tokens: int, columns: int
) -> None:
    """Of a rank's shared expert: the gate's rows have one block's scales, the up projection's another's; and a
    projection back takes as few columns."""
    weight, scales = packed(rng, (256, 128), mixture.FLOAT8)
    scales[1] += 3
    x = rng.standard_normal((tokens, 128), np.float32)
    args = {
        "out": never_coded(tokens, columns),
        "x": codes_of(x),
        "weight": Linear(np.concatenate([weight[:columns], weight[128 : 128 + columns]]), scales),
        "limit": LIMIT,
    }
    got, want = run_both(gate_up_clamped, args)
    assert error(values_in(got, "out"), values_in(want, "out")) < 6e-3
    if columns == 64:
        down, of_down = packed(rng, (64, 64), mixture.FLOAT8)
        args = {
            "out": never_coded(tokens, 64),
            "x": codes_of(x[:, :64]),
            "weight": Linear(down, of_down),
            "groups": 1,
        }
        got, want = run_both(project, args)
        assert error(values_in(got, "out"), values_in(want, "out")) < 6e-3


@pytest.mark.parametrize("quantized", [False, True])
def test_norm_rows(reference: Run, run_both: Both, rng: np.random.Generator, quantized: bool) -> None:
    gain = rng.uniform(0.5, 1.5, 384).astype(float32)
    args = {
        "out": never_coded(3, 384) if quantized else np.full((3, 384), np.nan, bfloat16),
        "x": rng.standard_normal((3, 384)).astype(bfloat16),
        "norm_weight": gain,
        "eps": 1e-6,
    }
    got, want, other = (
        values_in(found, "out")
        for found in (
            *run_both(norm_rows, args),
            reference(norm_rows, args | {"norm_weight": gain * np.float32(1.01)}),
        )
    )
    assert error(got, want) < 1e-3
    assert error(other, want) > 5e-3
    codes, want = run_both(code_rows, {"out": never_coded(3, 384), "x": args["x"]})
    np.testing.assert_array_equal(codes["out.codes"].view(np.uint8), want["out.codes"].view(np.uint8))
    np.testing.assert_array_equal(codes["out.scales"], want["out.scales"])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "k", "groups"), [(1536, 4096, 1), (32768, 1024, 1), (8192, 4096, 8), (4096, 8192, 1)]
)
@pytest.mark.parametrize("tokens", [1, 33, 128, 600, 1024])
@pytest.mark.parametrize("codes", [False, True])
def test_projections_of_published_shape(
    on_gpu: Run,
    reference: Run,
    rng: np.random.Generator,
    tokens: int,
    n: int,
    k: int,
    groups: int,
    codes: bool,
) -> None:
    args = layer(rng, tokens, n, k, "float8", groups, codes=codes and groups == 1)
    assert error(on_gpu(project, args)["out"], reference(project, args)["out"]) < 3e-3
