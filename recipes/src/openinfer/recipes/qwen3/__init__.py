"""Qwen3 (dense): config, weights, model, runner, engine, start-up. `RECIPE` is what the command line finds."""

from openinfer.recipes.qwen3.recipe import RECIPE

__all__ = ["RECIPE"]
