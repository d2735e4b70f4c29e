"""Shared by the context strategies. Start with `plan.py` (prediction)."""
