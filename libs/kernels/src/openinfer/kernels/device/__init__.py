"""Triton kernels. Importing a module of this package needs Triton; nothing else in the library does."""
