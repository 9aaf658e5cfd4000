"""Qwen3.5 (text; dense and mixtures of experts): config, weights, ops, model, runner, engine, start-up.

`RECIPE` is what the command line finds."""

from openinfer.recipes.qwen3_5.recipe import RECIPE

__all__ = ["RECIPE"]
