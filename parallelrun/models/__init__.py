"""Models as specs (`spec.py`, which needs no torch) and as modules (`network.py`); layers, weights, optimizers."""
