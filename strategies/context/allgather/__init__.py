"""Gathered keys and values: one all-gather before attention; few bytes where query heads share keys.

Paper: Grattafiori et al. 2024 (Llama 3), section 3.3.2.
Idea: queries stay, keys and values of all ranks are gathered, and each rank attends with its own queries.
Costs: per layer and microbatch two all-gathers and a reduce-scatter; keys and values of whole sequences during a layer.
Proof: exact (`tests/ranks/test_context_attention.py`).
"""
