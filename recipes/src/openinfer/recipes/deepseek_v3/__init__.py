"""DeepSeek-V3 and its kin: config, weights, ops, model. `RECIPE` is what the command line finds."""

from openinfer.recipes.deepseek_v3.recipe import RECIPE

__all__ = ["RECIPE"]
