"""fsdp: weights, gradients and optimizer state are sharded, and a block's weights are gathered while it computes.

Idea: Torch's FSDP2 (`fully_shard`) wraps every block. An all-gather before a block's forward and backward collects its
weights, and a reduce-scatter after its backward leaves every rank the summed gradients of its shard. With `shard` below
dp (HSDP) copies are shared by groups of ranks, whose gradients are all-reduced between the groups.
Paper: Zhao et al. 2023
Costs: with weights freed after forward, two all-gathers of the weights and one reduce-scatter per microbatch; all
tensors are divided by the number of ranks that share a copy.
Proof: exact.
Read `plan.py` (the predictions), `units.py` (what is gathered together), then `runtime.py`.
"""
