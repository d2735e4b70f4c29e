"""zero2: zero1 whose gradients are sharded as well.

Idea: Every backward pass reduce-scatters its buckets into this rank's shards and frees the complete gradients, so that
at most two buckets of those exist.
Paper: Rajbhandari et al. 2020
Costs: with m microbatches the gradients are reduced m times; gradients and optimizer state are divided by dp.
Proof: exact.
Read `plan.py` and `runtime.py`, then `common/zero_runtime.py` and `common/reducer.py`; `common/zero_plan.py` predicts.
"""
