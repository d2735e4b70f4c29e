"""What the context strategies share. Start with `plan.py` (prediction)."""
