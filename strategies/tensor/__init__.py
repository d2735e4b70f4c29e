"""Tensor parallelism: `megatron` (1D) and `grid` (2D, 2.5D, 3D) split the weights of each layer over the tp ranks."""
