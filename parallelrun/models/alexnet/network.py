"""The modules of the architecture in `spec.py`."""

from parallelrun.models.vision.network import build as build
