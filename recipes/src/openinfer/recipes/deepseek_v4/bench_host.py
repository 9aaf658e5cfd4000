"""A tiny engine over a device that does nothing: `openinfer bench host` measures what is left, the host's work."""

from __future__ import annotations

from openinfer.graph import Readback, StepGraphs
from openinfer.kernels import Pack
from openinfer.kvpool import Pool
from openinfer.recipes.deepseek_v4.buckets import Buckets
from openinfer.recipes.deepseek_v4.cache import groups
from openinfer.recipes.deepseek_v4.config import Config
from openinfer.recipes.deepseek_v4.engine import DeepseekV4Engine
from openinfer.recipes.deepseek_v4.places import Format
from openinfer.recipes.deepseek_v4.published import config_json
from openinfer.recipes.deepseek_v4.runner import Runner, readback_bytes
from openinfer.recipes.deepseek_v4.sizes import Room, Sizes
from openinfer.recipes.deepseek_v4.startup import STEPS_IN_FLIGHT, lay_out
from openinfer.scheduler import FirstCome
from openinfer.tensor import Arena, Device, Stream, float32

SMALL = {
    "hidden_size": 128, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_attention_heads": 2,
    "head_dim": 128, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 64, "index_n_heads": 16, "index_head_dim": 64,
    "index_topk": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "num_hash_layers": 1, "vocab_size": 1024, "max_position_embeddings": 8192,
}  # fmt: skip
"""What the host does for a step does not depend on the model's size."""


def idle_engine(rows: int, stream: Stream, pack: Pack, graphs: StepGraphs) -> DeepseekV4Engine:
    """An engine without prefix cache for sequences of 8,192 tokens, a quarter of which all rows may have at once.

    `pack` and `graphs` do nothing; a step's results are what `runner.model.buffers.result` holds.
    """
    config = Config.parse({**config_json("Flash", layers=3), **SMALL}, None)
    sizes, form = Sizes(8192, rows, 2048, float32, quantized=True), Format(fp4_experts=True)
    null, room = Arena(Device("null"), None), Room(2, 2)
    lay_out(config, form, sizes, null, Stream(null.device), room)
    model = lay_out(config, form, sizes, Arena(stream.device, null.used + (1 << 20)), stream, room)
    readback = Readback(stream.device, readback_bytes(rows, sizes.max_tokens), STEPS_IN_FLIGHT)
    runner = Runner(model, pack, stream, graphs, Buckets.up_to(rows, sizes.max_tokens), readback)
    runner.record()
    pages = rows * sizes.max_blocks // 4
    pool = Pool(groups(config, sizes.dtype.itemsize, pages, pages), prefix_cache=False)
    return DeepseekV4Engine(
        config, runner, pool, FirstCome(sizes.max_tokens), None,
        name="host", max_rows=rows, max_model_len=sizes.max_model_len, max_queued=4096,
    )  # fmt: skip
