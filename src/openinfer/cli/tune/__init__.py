"""`openinfer tune`: which kernels are fastest on this GPU, and the speeds behind predictions."""
