"""Triton code of the ops that only DeepSeek-V4 has."""
