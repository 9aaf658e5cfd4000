"""The shared ops, one a module: contract, numpy reference, launches, cost. Device code: openinfer.kernels.device."""
