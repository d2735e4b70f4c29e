"""Always sequence: Megatron's tensor parallelism, with sequence parallelism that cannot be switched off.

Paper: Korthikanti et al. 2022.
Costs: as layout=1d with sequence parallelism.
Proof: exact.
"""
