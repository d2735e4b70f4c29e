"""Mixtures of experts, as for one device: routing is part of the model, how rows travel is the expert dispatcher's."""
