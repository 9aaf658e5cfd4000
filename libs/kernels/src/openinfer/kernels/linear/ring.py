"""The product of a few tokens by a ring of weights in shared memory: device/ring.cu and ring_tokens.cu, and of one
token with codes device/ring_groups.cu."""

from collections.abc import Iterator, Mapping

from openinfer.kernels.formats.fp4 import Fp4, fp4_row
from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.formats.int4 import Int4Groups
from openinfer.kernels.formats.linear import Plain
from openinfer.kernels.linear.choices import RING_COLUMNS, group_ring_choice, planned, under_way
from openinfer.kernels.linear.problem import Kernel, Problem
from openinfer.kernels.op.launch import Aligned, Arg, Command, Launch, launch_cuda
from openinfer.kernels.op.rounding import SCALE_BLOCK, Coding
from openinfer.kernels.store.tables import ProductChoice
from openinfer.tensor import float32

_CODINGS: dict[Coding | None, int] = {None: 0, "block": 1, "token": 2, "tensor": 3}


def _plain(p: Problem) -> Iterator[Command]:
    """In bf16, by `warps` warps and a ring of `stages` times `bn` rows. No normalised value is rounded."""
    c, k = planned(p), p.k
    if p.m == 1:
        constants = {"CHUNKS": k // RING_COLUMNS // c.warps}
        kernel, row, sums = "ring", 2 * k, (c.warps | 1, c.warps)
    else:
        constants = {"TOKENS": p.m, "COLUMNS": k, "PARTS": c.split}
        row = 2 * k // c.split
        row += 0 if row % 128 else 64  # see ring_tokens.cu
        kernel, sums = "ring_tokens", (p.m * (c.warps | 1), p.m * c.warps)
    # Of several tokens a stage takes longer than the next ones to come.
    most = under_way(c.stages, c.bn * row, 1, codes=False) if p.m == 1 else c.stages
    yield _ring(kernel, c, p, {"weight": p.weight.weight}, constants, c.bn * row, most, sums)


def _ring(
    kernel: str,
    c: ProductChoice,
    p: Problem,
    weights: Mapping[str, Arg],
    constants: Mapping[str, int],
    stage: int,
    most_under_way: int,
    sums: tuple[int, int],
) -> Launch:
    """The launch of a ring. weights, constants: its own arguments; stage: bytes; most_under_way: stages; sums: float32
    numbers for each row of a program's stages, and besides."""
    gain, eps = p.norm or (p.x, 0.0)
    programs, rows = min(p.target.num_sms, p.n), c.bn // 2 if p.gated else c.bn
    most = -(-p.n // programs)
    turns = -(-most // rows)
    args = {"out": p.out, "x": p.x, "gain": gain, **weights, "N": Aligned(p.n), "eps": eps}
    own = {"WARPS": c.warps, "ROWS": c.bn, "STAGES": c.stages, "UNDER_WAY": most_under_way, "TURNS": turns}
    own |= {"NORM": p.norm is not None, "WIDE": gain.dtype == float32, "ADD": p.add, "GATED": p.gated}
    own |= {"FLOAT": p.out.dtype == float32, **constants}
    numbers = turns * c.bn * sums[0] + sums[1]
    threads, shared = 32 * c.warps + 32, c.stages * (stage + 16) + -(-numbers // 4) * 16
    spec = "openinfer.kernels.device", f"{kernel}.cu", f"gemv_{kernel}", (programs,)
    return launch_cuda(*spec, args, own, threads=threads, shared=shared, early=True)


def group_choice(p: Problem) -> ProductChoice | None:
    """The ring for one token and a weight of codes, or None. Weights of FP8 are for activations that are quantised, and
    FP4 and INT4 for those that are not, INT4 with a scale for each 128 columns."""
    words = _words(p)
    if p.m != 1 or not (words or (isinstance(p.form, Fp8) and p.weight.coding is not None)):
        return None
    return group_ring_choice(p.target, p.n, p.k, words=words, gated=p.gated)


def _words(p: Problem) -> int:
    """Bytes of a row's words that travel with its codes: none of FP8."""
    if isinstance(p.form, Fp4):
        return fp4_row(p.k)
    return 4 * (p.k // SCALE_BLOCK) if p.form == Int4Groups(SCALE_BLOCK) else 0


def _of_codes(p: Problem) -> Iterator[Command]:
    """Codes of FP8, FP4 or INT4. x is quantised in the kernel, for FP8."""
    c, weight, scales = group_choice(p), p.weight.weight, p.weight.scales
    assert c is not None
    assert scales is not None
    words, groups = _words(p), p.k // SCALE_BLOCK
    constants = {"COLUMNS": p.k, "GROUP_BYTES": SCALE_BLOCK // 2 if words else SCALE_BLOCK}
    constants["CODING"] = 4 if isinstance(p.form, Fp4) else _CODINGS[p.weight.coding]
    constants["BY_ROW"] = p.form == Fp8(by_row=True)
    x_scale = scales if p.weight.x_scale is None else p.weight.x_scale
    weights: dict[str, Arg] = {"x_scale": x_scale, "weight": weight, "scales": scales}
    stage = c.bn * (weight.shape[1] + words)
    most = under_way(c.stages, stage, 1, codes=True)
    yield _ring("ring_groups", c, p, weights, constants, stage, most, (groups | 1, 2 * c.warps + p.k // 2))


PLAIN = Kernel("ring", lambda p: p.form == Plain() and planned(p).kind == "ring", _plain)
OF_CODES = Kernel("ring of codes", lambda p: p.x_scales is None and group_choice(p) is not None, _of_codes)
