"""naive_ddp: complete copies, and one blocking all-reduce per gradient after backward.

Idea: Every rank of dp trains the complete stage on its own samples. When backward is over, each parameter's gradient is
summed over the replicas, one tensor after the other. Nothing is overlapped and nothing is fused: the step before the
buckets of `ddp`, for reading and for measuring what buckets save.
Paper: Li et al. 2020 (PyTorch Distributed, section 3.2.1: the naive solution)
Costs: one all-reduce per parameter a step, none of them hidden by backward; complete weights, gradients and optimizer
state on every rank.
Proof: exact.
Read `runtime.py`, then `plan.py`.
"""
