"""openinfer.kernels"""
