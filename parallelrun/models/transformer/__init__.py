"""Shared by gpt, bert and mlp: sizes, layer specs and FLOPs (`spec.py`, torch-free) and modules (`modules.py`)."""
