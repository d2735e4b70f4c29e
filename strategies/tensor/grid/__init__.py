"""Tensor2D, Tensor25D, Tensor3D: samples, features and weights are split over a grid (or a cube) of ranks.

Paper: 2D: SUMMA, van de Geijn and Watts 1997, as in Optimus (Xu et al. 2021, "An Efficient 2D Method for Training
    Super-Large Deep Learning Models"). 2.5D: Tesseract (Wang et al. 2021). 3D: Agarwal et al. 1995, "Maximizing
    Parallelism in Distributed Training for Huge Neural Networks" (Bian et al. 2021). All three as in Colossal-AI; forms
    chosen per layer as in MeshSlice and AxoNN (Singh et al. 2023).
Idea: every matrix of Y = X W^T is split over all axes, so a rank holds 1/tp of activations and weights alike. A product
    gathers one or two operands, or scatters partial sums, along one axis each. For each pair of layers the plan takes
    the form that moves the fewest bytes. 2.5D stacks grids with copies of the weights.
Costs: bytes per rank fall with the side of the grid (2D: as 1/sqrt(tp); 3D: as 1/tp^(2/3)), for more messages.
Proof: exact. The same function and gradients as on one device.

Where to find what: `shape` (which grids tp can form), `forms` (how pairs of layers multiply), `checks`, `plan` (the
strategies, with the layouts and the product of each layer); with torch: `matmul` (fused), `split_backward`, `summa`,
`lookup`, `norm` (operators), `buffers`, `block_matrix` (their data), `layers`, `runtime`.
"""
