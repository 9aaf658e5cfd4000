"""Llama 3.x, Mistral and Qwen2.5 for openinfer, from a distribution of its own. The command line finds `RECIPE`."""

from openinfer_llama.recipe import RECIPE

__all__ = ["RECIPE"]
