"""Qwen3.5 (dense and mixture of experts)."""
