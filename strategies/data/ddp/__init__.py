"""ddp: replicas with complete copies, whose gradients are all-reduced during backward.

Idea: Every rank of dp trains the complete stage on its own samples. Backward computes gradients from the last layer to
the first; they are collected in buckets, and a full bucket is all-reduced while the rest of backward runs. Losses are
divided by the global number of targets beforehand, so that gradients are summed, never averaged.
Paper: Li et al. 2020 (PyTorch Distributed)
Costs: one all-reduce of all gradients a step; complete weights, gradients and optimizer state on every rank.
Proof: exact; with compressed gradients a replay (`common/compression/reference.py`).
Read `plan.py`, then `common/reducer.py` (the run time) and `common/buckets.py`; `common/bucketed_plan.py` predicts.
"""
