"""Negative controls of the accuracy gate that models with packed weights share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.weights import Linear, without_zero_points
from openinfer.recipes.engine.blueprint import Control


def of_scales(linear: Linear) -> Iterator[Control]:
    """Wrong scales of one packed weight: in another order, and without the zero points of INT4."""
    if linear.scales is None:
        return
    scales = np.array(linear.scales.numpy())
    yield Control("scales of other rows in one layer", [(linear.scales, np.roll(scales, 1, 0))])
    if min(scales.shape) > 1:
        transposed = np.ascontiguousarray(scales.T).reshape(scales.shape)
        yield Control("scales transposed in one layer", [(linear.scales, transposed)])
    dropped = without_zero_points(scales)
    if dropped is not None:
        yield Control("zero points dropped in one layer", [(linear.scales, dropped)])
