"""Gradient compression for strategies that all-reduce gradients in buckets: fp16, bf16 and PowerSGD.

`plan.py` predicts the messages; `registry.COMPRESSIONS` names the module that sends them (`sender`) for each kind.
"""
