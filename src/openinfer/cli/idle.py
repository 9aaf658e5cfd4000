"""A tiny engine over a device that does nothing, so only the host's work takes time; for `openinfer bench host`.

The host's work for a step does not depend on the model's size, so the smallest model of a recipe is enough.
"""

from __future__ import annotations

from typing import Any

from openinfer.graph import Readback, StepGraphs, StepPace, StepTrace, Watch
from openinfer.graph.runner import Runner, readback_bytes
from openinfer.kernels import Pack
from openinfer.kvpool import Pool
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.limits import Limits
from openinfer.recipes.engine.options import O
from openinfer.recipes.engine.recipe import Recipe, Source
from openinfer.recipes.engine.startup import STEPS_IN_FLIGHT, buckets_for
from openinfer.scheduler import FirstCome
from openinfer.tensor import Arena, Device, Stream, float32

LENGTH, TOKENS = 8192, 2048


def idle_engine(recipe: Recipe[O], rows: int, stream: Stream, pack: Pack, graphs: StepGraphs) -> Engine:
    """An engine of the recipe's smallest model, without prefix cache, for sequences of 8,192 tokens.

    The pool has blocks for half of all rows at full length, and for one row at least. `pack` and `graphs` must do
    nothing. The results of a step are the contents of `runner.model.batch.sampled.result`.
    """
    options = recipe.options(max_num_seqs=rows, enable_prefix_caching=False)
    blueprint: Any = recipe.blueprint(Source(recipe.small), options)
    limits = Limits(LENGTH, rows, TOKENS, blueprint.page_size, float32)
    groups = len(blueprint.groups(limits))
    null = Arena(Device("null"), None)
    blueprint.lay_out(null, Stream(null.device), limits, [2] * groups)
    model = blueprint.lay_out(Arena(stream.device, null.used + (1 << 20)), stream, limits, [2] * groups)
    readback = Readback(stream.device, readback_bytes(rows, TOKENS), STEPS_IN_FLIGHT)
    trace = StepTrace()
    buckets, pace, watch = buckets_for(blueprint, limits), StepPace(), Watch(trace)
    runner = Runner(model, pack, stream, graphs, buckets, readback, pace, trace, watch)
    runner.record()
    # Blocks without memory behind them: no op runs.
    blocks = max(rows // 2, 1) * limits.max_blocks
    pool = Pool(blueprint.groups(limits, [blocks] * groups), prefix_cache=False)
    return Engine(
        runner, pool, FirstCome(TOKENS), None,
        name="host", eos_token_ids=blueprint.eos_token_ids, max_rows=rows, max_model_len=LENGTH, max_queued=4096,
    )  # fmt: skip
