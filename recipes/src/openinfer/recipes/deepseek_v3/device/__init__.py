"""Triton code of the ops that only DeepSeek-V3 has."""
