"""DeepSeek-V4: config, weights, ops, model, runner, engine, start-up.

`RECIPE` is what the command line finds."""

from openinfer.recipes.deepseek_v4.recipe import RECIPE

__all__ = ["RECIPE"]
