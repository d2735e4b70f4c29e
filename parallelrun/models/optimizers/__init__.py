"""The update of weights: torch's optimizers over local tensors, Muon, and bf16 weights that are rounded at random."""
