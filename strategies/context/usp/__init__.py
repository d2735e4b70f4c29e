"""USP: Ulysses within groups of ranks, ring attention between the groups.

Paper: Fang and Zhao 2024 (A Unified Sequence Parallelism Approach).
Idea: the heads limit Ulysses; a ring multiplies it.
Costs: the all-to-alls of Ulysses within a group, and the messages of a ring as long as there are groups.
Proof: exact (`tests/ranks/test_context_attention.py`).
"""
