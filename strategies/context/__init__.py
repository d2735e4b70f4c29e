"""Context parallelism: the cp ranks share every sequence, and their tokens attend to each other's.

Idea: a rank has its own tokens' queries, keys and values. `ring` passes keys and values from rank to rank, under the
attention to those that have arrived, and merges results by log-sum-exp. `allgather` gathers keys and values before
attention. `ulysses` exchanges tokens for heads by an all-to-all, because attention of different heads is independent,
and a second all-to-all returns the results. `usp` does so within groups of ranks, and forms rings between them.
Costs, per layer and microbatch:

kind       paper                            messages                                      condition, memory
ring       Liu et al. 2023                  cp - 1 in forward, 2 cp - 1 in backward       two blocks in flight
allgather  Grattafiori et al. 2024, 3.3.2   two all-gathers, one reduce-scatter           keys of complete sequences
ulysses    Jacobs et al. 2023               four all-to-alls                              cp divides the heads
usp        Fang and Zhao 2024               those of ulysses and ring, in smaller groups  the groups divide the heads

Proof: exact (`tests/ranks/test_context_attention.py`).
Read `plan.py` first (the kinds), then `blockwise_plan.py` (what they predict), `runtime.py` and `models/blockwise`.
"""
