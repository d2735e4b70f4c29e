"""What gpt, bert and mlp share: sizes, layer specs and FLOPs (`spec.py`, torch-free) and modules (`modules.py`)."""
