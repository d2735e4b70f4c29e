"""Pipeline parallelism: consecutive layers form stages on different ranks, and microbatches flow through them.

Idea: a batch is cut into m microbatches. Each stage sends a microbatch's activations to the next stage in forward and
the gradients back in backward, so several stages work on different microbatches at the same time. A schedule is the
order of these passes on each rank. torch.distributed.pipelining runs the schedules; `orders.py` predicts them.
Costs: one activation and one gradient message per microbatch and cut; idle time (the bubble) while the pipeline fills
and drains; activations of the microbatches between their forward and backward.

schedule     paper                              bubble / ideal time   microbatches kept   condition
naive        (what pipelines improve on)        pp - 1                1                   one microbatch
gpipe        Huang et al. 2019                  (pp - 1) / m          m                   none
1f1b         Narayanan et al. 2019, 2021        (pp - 1) / m          at most pp          m >= pp
interleaved  Narayanan et al. 2021, 2.2.2       (pp - 1) / (v m)      more than 1f1b      rounds of about pp
zero_bubble  Qi et al. 2023, section 3 (ZB1P)   about a third of 1f1b as 1f1b             rounds of about pp
zbv          Qi et al. 2023, section 6 (ZB-V)   about 0               as 1f1b             two stages per rank, in a V
dualpipev    DeepSeek-AI 2024, section 3.2.1    (pp - 1) / (3 m)      as 1f1b             as zbv

Proof: exact. Loss, every gradient and every update equal one device's in fp64 (`tests/ranks/test_pipeline.py`), and the
predicted orders equal torch's own (`tests/unit/strategies/pipeline/test_orders.py`).
Read `plan.py` first (the schedules), then `schedule.py` (what they predict), `orders.py`, `messages.py`, `runtime.py`.
"""
