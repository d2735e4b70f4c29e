"""ring: ddp with an all-reduce of its own, as messages between the ranks.

Idea: The buffer is cut into one block per rank. In n - 1 rounds of scatter-reduce every rank sends a block to the next
rank, which adds it to its own; in n - 1 rounds of all-gather the sums travel around the ring. Other algorithms can be
chosen: halving_doubling, hierarchical, tree, or native (the backend's).
Paper: Patarasuk and Yuan 2009; Gibiansky 2017
Costs: every rank sends 2 (n - 1) / n of all gradients a step, in 2 (n - 1) rounds.
Proof: exact; with compressed gradients a replay (`common/compression/reference.py`).
Read `runtime.py`, then `common/allreduce/rounds.py` (the rounds) and `common/allreduce/runtime.py` (the messages).
"""
