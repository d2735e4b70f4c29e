"""Each tensor: data parallelism with one all-reduce per parameter, after backward.

Paper: none; it is what buckets improve on.
Costs: one all-reduce per parameter and step, none of them behind computation.
Proof: exact.
"""
