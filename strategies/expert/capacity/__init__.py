"""Capacity dispatcher: every expert has a fixed number of slots per routing group, so all messages have one size.

Paper: Lepikhin et al. 2020 (GShard), section 3.2.
Idea: each expert offers `capacity` slots for each routing group. Kept tokens fill slots, empty slots are sent as zeros,
and tokens without a slot are dropped by the router. No size depends on the data, so no counts are exchanged.
Costs: per layer and microbatch four all-to-alls of experts x groups x capacity rows, empty slots included.
Proof: exact (`tests/ranks/test_expert_parity.py`, `test_expert_dispatch.py`).
"""
