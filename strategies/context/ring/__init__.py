"""Ring attention: keys and values travel from rank to rank, under the attention to those that are there.

Paper: Liu et al. 2023 (Ring Attention with Blockwise Transformers).
Idea: a rank attends to one block of keys and values while the next arrives, and merges results by log-sum-exp.
Costs: per layer and microbatch cp - 1 messages in forward, 2 cp - 1 in backward; two blocks in flight.
Proof: exact (`tests/ranks/test_context_attention.py`).
"""
