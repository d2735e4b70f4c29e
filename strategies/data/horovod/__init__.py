"""horovod: ddp with what belongs to Horovod: broadcast, fusion, Adasum, process sets, join, timeline.

Idea: Initial weights are broadcast from worker 0 and gradients are all-reduced in fused buffers during backward. What
Horovod negotiates in every cycle (which tensors are ready everywhere) is fixed in the plan: there is no cycle time, and
its response cache would always hit. `bucket_mb` is the fusion threshold, `microbatches` backward_passes_per_step.
Paper: Sergeev and Del Balso 2018; Maleki et al. 2021 (Adasum)
Costs: those of ddp; Adasum sends updates in place of gradients, and dot products.
Proof: exact; Adasum, process sets, join and compression a replay (`reference.py`).
Read `plan.py`, `checks.py` and `runtime.py`; each further file is one feature.
"""
