"""Kernels. They have a package of their own, because the key of a compiled kernel is of its whole package."""
