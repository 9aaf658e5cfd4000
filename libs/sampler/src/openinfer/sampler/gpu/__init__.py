"""openinfer.sampler.gpu: sampling as ops that a step graph captures. They run on every pack of openinfer.kernels."""

from openinfer.sampler.gpu.ops.adjustments import SlotField, adjustment_fields, adjustment_values
from openinfer.sampler.gpu.ops.advance import advance
from openinfer.sampler.gpu.ops.rows import Adjustment, RowStatus
from openinfer.sampler.gpu.ops.sample import sample
from openinfer.sampler.gpu.ops.score import score
from openinfer.sampler.gpu.ops.top_logprobs import top_logprobs

__all__ = [
    "Adjustment",
    "RowStatus",
    "SlotField",
    "adjustment_fields",
    "adjustment_values",
    "advance",
    "sample",
    "score",
    "top_logprobs",
]
