"""Triton kernels of Qwen3.5. Importing a module of this package needs Triton; nothing else of the recipe does."""
