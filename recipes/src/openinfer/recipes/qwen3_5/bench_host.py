"""A tiny engine over a device that does nothing: `openinfer bench host` measures what is left, the host's work."""

from __future__ import annotations

from openinfer.graph import Readback, StepGraphs
from openinfer.kernels import Pack
from openinfer.kvpool import Pool
from openinfer.recipes.qwen3_5.buckets import Boundaries, Buckets
from openinfer.recipes.qwen3_5.config import Config
from openinfer.recipes.qwen3_5.engine import Qwen35Engine
from openinfer.recipes.qwen3_5.runner import Runner, readback_bytes
from openinfer.recipes.qwen3_5.sizes import Room, Sizes
from openinfer.recipes.qwen3_5.startup import STEPS_IN_FLIGHT, lay_out, pool_groups
from openinfer.recipes.qwen3_5.weights import Format
from openinfer.scheduler import FirstCome
from openinfer.tensor import Arena, Device, Stream, float32

CONFIG = {
    "model_type": "qwen3_5_text", "hidden_size": 16, "num_hidden_layers": 2, "full_attention_interval": 2,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 1,
    "linear_num_value_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "intermediate_size": 16, "vocab_size": 1024, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip
"""What the host does for a step does not depend on the model's size."""


def idle_engine(rows: int, stream: Stream, pack: Pack, graphs: StepGraphs) -> Qwen35Engine:
    """An engine without prefix cache for sequences of 8,192 tokens, a quarter of which all rows may have at once.

    `pack` and `graphs` do nothing; a step's results are what `runner.model.buffers.result` holds.
    """
    boundaries = Boundaries(512)
    config, sizes = Config.parse(CONFIG, None), Sizes(8192, rows, 2048, 16, float32, boundaries)
    form, null, room = Format.published(config), Arena(Device("null"), None), Room(2, 2)
    lay_out(config, form, sizes, null, Stream(null.device), room)
    model = lay_out(config, form, sizes, Arena(stream.device, null.used + (1 << 20)), stream, room)
    readback = Readback(stream.device, readback_bytes(rows, sizes.max_tokens), STEPS_IN_FLIGHT)
    runner = Runner(model, pack, stream, graphs, Buckets.up_to(rows, sizes.max_tokens), readback, boundaries)
    runner.record()
    pool = Pool(pool_groups(config, sizes, Room(rows * sizes.max_blocks // 4, rows + 1)), prefix_cache=False)
    return Qwen35Engine(
        config, runner, pool, FirstCome(sizes.max_tokens), None,
        name="host", max_rows=rows, max_model_len=sizes.max_model_len, max_queued=4096,
    )  # fmt: skip
