"""All ways to make a product with the weight of a linear layer, in the order in which they are asked."""

from collections.abc import Iterator

from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.linear import cluster, coded, cublas, few_bits, int4, lora, mx, plain, ring
from openinfer.kernels.linear.problem import Problem, expect_bf16, expect_float8
from openinfer.kernels.op.launch import Command

KERNELS = (
    *lora.KERNELS,
    *mx.KERNELS,
    ring.OF_CODES,
    coded.QUANTISED,
    cluster.OF_CODES,
    plain.GEMV,
    cublas.OF_CODES,
    coded.TILES,
    ring.PLAIN,
    plain.NORMED,
    int4.CLUSTERS,
    *few_bits.KERNELS,
    plain.WIDENED,
    cluster.PLAIN,
    plain.SMALL,
    plain.GATED,
    cublas.PLAIN,
    plain.LARGE,
)
"""Rings and clusters are CUDA C++ for few tokens. What precedes or follows a product has a kernel of its own where the
product's kernel does not do it: lora, coded.QUANTISED, plain.NORMED, plain.WIDENED."""


def launches(problem: Problem) -> Iterator[Command]:
    """The commands of a product. Raises ContractError for what no kernel of the target takes."""
    if problem.x_scales is None:
        expect_bf16(problem.x)
    if isinstance(problem.form, Fp8):
        expect_float8(problem.target)
    kernel = next(one for one in KERNELS if one.takes(problem))
    for made in kernel.launches(problem):
        if isinstance(made, Problem):
            yield from launches(made)
        else:
            yield made
