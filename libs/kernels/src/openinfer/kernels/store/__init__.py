"""Compiled kernels, and the processes that compile them."""
