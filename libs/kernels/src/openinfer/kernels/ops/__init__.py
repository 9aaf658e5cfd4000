"""The shared ops, one a module: contract, numpy reference, launches, cost. Their device code is in openinfer.kernels.device."""
