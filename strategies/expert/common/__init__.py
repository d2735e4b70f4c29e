"""What the expert dispatchers share. Start with `plan.py` (prediction) or `dispatcher.py` (run time)."""
