"""How long kernels, calls and steps take: measured and predicted."""
