"""Megatron (1D): each layer's weight is split over one axis, columns first, then rows.

Paper: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism";
    sequence parallelism: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".
Idea: a column-parallel layer splits its outputs and sends nothing in forward. The row-parallel layer behind it splits
    its inputs; its partial sums are all-reduced. Backward mirrors this. Heads, the MLP's inside, experts and the
    vocabulary are split. Under sequence parallelism everything between such pairs is split along the sequence, and each
    all-reduce becomes a reduce-scatter and an all-gather.
Costs: two all-reduces of an activation per pair of layers and direction, whatever tp is. Weights shrink with tp;
    activations between pairs do so only under sequence parallelism.
Proof: exact. The same function and gradients as on one device.
"""
