"""diloco: local SGD in which an outer optimizer follows the replicas' mean movement.

Idea: After `sync_every` steps the mean difference between the weights at the beginning of the round and now is the
gradient of an outer SGD with Nesterov momentum. Its result is the weights with which all replicas begin the next round.
Paper: Douillard et al. 2023
Costs: the traffic of local SGD; two more tensors per weight (the shared weights and the outer momentum).
Proof: replay (`reference.py`).
Read `plan.py` and `runtime.py`, then `common/independent_plan.py` and `common/independent_runtime.py`.
"""
