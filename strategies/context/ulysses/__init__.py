"""Ulysses: an all-to-all exchanges tokens for heads, and a second one brings the results back.

Paper: Jacobs et al. 2023 (DeepSpeed Ulysses).
Idea: attention of different heads is independent, so each rank computes some heads over complete sequences.
Costs: per layer and microbatch four all-to-alls; cp must divide the heads.
Proof: exact (`tests/ranks/test_context_attention.py`).
"""
