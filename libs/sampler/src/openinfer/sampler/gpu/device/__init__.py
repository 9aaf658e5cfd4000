"""Triton kernels of the sampling ops."""
