"""The ops that only DeepSeek-V4 has: contract, numpy reference, launches, cost."""

PAGE = 128
"""Tokens of a page of either group: the least common multiple of the ratios 4 and 128."""
