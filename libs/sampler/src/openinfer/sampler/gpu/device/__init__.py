"""Triton kernels of the sampling ops. Importing a module of this package needs triton."""
