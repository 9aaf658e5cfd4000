"""A tiny engine over a device that does nothing: `openinfer bench host` measures what is left, the host's work."""

from __future__ import annotations

from openinfer.graph import Readback, StepGraphs
from openinfer.kernels import Pack
from openinfer.kvpool import Group, Pool
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3.engine import Qwen3Engine
from openinfer.recipes.qwen3.runner import Buckets, Runner, readback_bytes
from openinfer.recipes.qwen3.startup import STEPS_IN_FLIGHT, Sizes, lay_out
from openinfer.scheduler import FirstCome
from openinfer.tensor import Arena, Device, Stream, float32

CONFIG = {
    "model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 16, "vocab_size": 1024,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
"""What the host does for a step does not depend on the model's size."""


def idle_engine(rows: int, stream: Stream, pack: Pack, graphs: StepGraphs) -> Qwen3Engine:
    """An engine without prefix cache for sequences of 8,192 tokens, a quarter of which all rows may have at once.

    `pack` and `graphs` do nothing; a step's results are what `runner.model.buffers.result` holds.
    """
    config, sizes = Config.parse(CONFIG, None), Sizes(8192, rows, 2048, 16, float32)
    null = Arena(Device("null"), None)
    lay_out(config, sizes, null, Stream(null.device), 2)
    model = lay_out(config, sizes, Arena(stream.device, null.used + (1 << 20)), stream, 2)
    readback = Readback(stream.device, readback_bytes(rows, sizes.max_tokens), STEPS_IN_FLIGHT)
    runner = Runner(model, pack, stream, graphs, Buckets.up_to(rows, sizes.max_tokens), readback)
    runner.record()
    pool = Pool([Group("kv", 16, rows * sizes.max_blocks // 4, 1)], prefix_cache=False)
    return Qwen3Engine(
        config, runner, pool, FirstCome(sizes.max_tokens), None,
        name="host", max_rows=rows, max_model_len=sizes.max_model_len, max_queued=4096,
    )  # fmt: skip
