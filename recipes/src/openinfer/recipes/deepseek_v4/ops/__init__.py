"""The ops that only DeepSeek-V4 has: contract, numpy reference, launches, cost."""
