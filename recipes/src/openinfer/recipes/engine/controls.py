"""Negative controls of the accuracy gate that models share: faults of the rotation, of weights, and of a rank."""

from collections.abc import Iterator, Sequence

import numpy as np

from openinfer.kernels.authoring import Linear, without_zero_points
from openinfer.recipes.engine.blueprint import Control
from openinfer.tensor import Tensor


def of_rotation(*tables: Tensor) -> Iterator[Control]:
    """Sines of the other sign. tables: float32 [positions, 2, r / 2] (kernels.rope_table)."""
    turn = np.array([1, -1], np.float32)[:, None]
    yield Control("rotation backwards", [(table, np.array(table.numpy()) * turn) for table in tables])


def of_halves(where: str, *stacked: Tensor | None) -> Iterator[Control]:
    """Gate and up, which lie one behind the other in the last axis but one of a weight, and in scales, swapped."""
    tensors = [tensor for tensor in stacked if tensor is not None]
    changes = [(one, np.roll(one.numpy(), one.shape[-2] // 2, axis=-2)) for one in tensors]
    yield Control(f"gate and up swapped in {where}", changes)


def of_scales(linear: Linear[Tensor]) -> Iterator[Control]:
    """Wrong scales of one packed weight: in another order, and without the zero points of INT4."""
    if linear.scales is None:
        return
    scales = np.array(linear.scales.numpy())
    yield Control("scales of other rows in one layer", [(linear.scales, np.roll(scales, 1, 0))])
    if min(scales.shape) > 1:
        transposed = np.ascontiguousarray(scales.T).reshape(scales.shape)
        yield Control("scales transposed in one layer", [(linear.scales, transposed)])
    dropped = without_zero_points(linear.form, scales)
    if dropped is not None:
        yield Control("zero points dropped in one layer", [(linear.scales, dropped)])


def of_ranks(
    ranks: int, outputs: Sequence[Linear[Tensor]], experts: Sequence[Linear[Tensor]] = ()
) -> Iterator[Control]:
    """Faults of one of several ranks: it has another rank's columns of `outputs`, or no columns of them, or the experts
    next to its own. outputs: weights whose products the ranks add up."""
    if ranks == 1:
        return
    weights = [(linear.weight, np.array(linear.weight.numpy())) for linear in outputs]
    others = [(tensor, np.roll(array, array.shape[1] // 2, 1)) for tensor, array in weights]
    yield Control("a rank has another's columns", others)
    yield Control("a rank's part of a sum is missing", [(tensor, np.zeros_like(a)) for tensor, a in weights])
    tensors = [x for linear in experts for x in (linear.weight, linear.scales) if x is not None]
    if tensors:
        yield Control("a rank's experts are off by one", [(x, np.roll(x.numpy(), 1, 0)) for x in tensors])
