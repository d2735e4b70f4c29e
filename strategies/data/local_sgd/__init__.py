"""local_sgd: replicas train independently and average their weights every few steps.

Idea: Every replica updates its own weights by its own gradients. After `sync_every` steps, and after the last, weights
are replaced by their mean; the optimizer's state stays local.
Paper: Stich 2019; Lin et al. 2020
Costs: one all-reduce of the weights in `sync_every` steps; complete weights and state on every rank.
Proof: replay (`reference.py`); the replicas' weights are compared one by one.
Read `runtime.py`, then `common/independent_plan.py` and `common/independent_runtime.py`.
"""
