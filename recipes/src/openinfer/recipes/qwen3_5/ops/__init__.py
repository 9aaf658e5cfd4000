"""The ops that only Qwen3.5 has, one a module: contract, numpy reference, launches, cost."""
