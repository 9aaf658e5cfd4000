"""Llama 3.x and Mistral for openinfer, from a distribution of its own. The command line finds `RECIPE`."""

from openinfer_llama.recipe import RECIPE

__all__ = ["RECIPE"]
