"""zero1: ddp whose optimizer state is sharded over the replicas.

Idea: Every rank owns a chunk of each parameter. A reduce-scatter in place of the all-reduce gives it the summed
gradients of its chunks, its optimizer updates them, and an all-gather shares the new weights.
Paper: Rajbhandari et al. 2020
Costs: the traffic of ddp; optimizer state is divided by dp; complete weights and gradients on every rank.
Proof: exact.
Read `plan.py` and `runtime.py`, then `common/zero_runtime.py` and `common/reducer.py`; `common/zero_plan.py` predicts.
"""
