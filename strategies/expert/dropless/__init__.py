"""Dropless dispatcher: only rows that an expert computes are sent, in uneven all-to-alls, after their counts.

Paper: Gale et al. 2022 (MegaBlocks).
Idea: ranks first exchange how many rows go to each expert, then send exactly those rows, sorted by expert. No slot is
empty and no token is dropped for lack of one; a router that limits its experts still drops what exceeds the limit.
Costs: per layer and microbatch four all-to-alls whose size depends on the data, one of counts, and one wait for the
device, because the sizes must be known on the host.
Proof: exact (`tests/ranks/test_expert_parity.py`, `test_expert_dispatch.py`).
"""
