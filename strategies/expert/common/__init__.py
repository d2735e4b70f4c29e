"""Shared by the expert dispatchers. Start with `plan.py` (prediction) or `dispatcher.py` (run time)."""
