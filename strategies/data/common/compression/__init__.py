"""Gradient compression for strategies that all-reduce gradients in buckets: fp16 and PowerSGD."""
