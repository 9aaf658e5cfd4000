"""openinfer.sampler"""
