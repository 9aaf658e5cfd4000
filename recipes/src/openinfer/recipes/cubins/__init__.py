"""Compiled kernels of the recipes, laid out as openinfer.kernels.Store reads them.

Empty in a checkout. A wheel built with OPENINFER_CUBIN_ARCHS=90,100 has the kernels of all published sizes for those
architectures, and then a machine needs no compiler to serve them.
"""
