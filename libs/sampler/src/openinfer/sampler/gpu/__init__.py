"""openinfer.sampler.gpu: sampling as ops that a step graph captures. They run on every pack of openinfer.kernels."""

try:
    from openinfer.sampler.gpu.ops import Adjustment, RowStatus
    from openinfer.sampler.gpu.ops.adjustments import SlotField, mask_words
    from openinfer.sampler.gpu.ops.advance import accept, advance
    from openinfer.sampler.gpu.ops.propose import follow, propose, widen
    from openinfer.sampler.gpu.ops.sample import greedy, sample
    from openinfer.sampler.gpu.ops.state import ADVANCE_FIELDS, MAX_STOP_IDS, SAMPLE_FIELDS, fields, values
    from openinfer.sampler.gpu.ops.top_logprobs import score, top_logprobs
    from openinfer.sampler.gpu.segment import (
        SampleBuffers,
        draw_drafts,
        greedy_rows,
        masks_after,
        sample_rows,
        score_tokens,
        verify_rows,
    )
except ModuleNotFoundError as error:
    if error.name not in ("openinfer.kernels", "openinfer.tensor"):
        raise
    from openinfer.sampler.errors import MissingExtra

    raise MissingExtra(f"sampling as ops needs {error.name}: pip install 'openinfer-sampler[gpu]'") from error

__all__ = [
    "ADVANCE_FIELDS",
    "MAX_STOP_IDS",
    "SAMPLE_FIELDS",
    "Adjustment",
    "RowStatus",
    "SampleBuffers",
    "SlotField",
    "accept",
    "advance",
    "draw_drafts",
    "fields",
    "follow",
    "greedy",
    "greedy_rows",
    "mask_words",
    "masks_after",
    "propose",
    "sample",
    "sample_rows",
    "score",
    "score_tokens",
    "top_logprobs",
    "values",
    "verify_rows",
    "widen",
]
