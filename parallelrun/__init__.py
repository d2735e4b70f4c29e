"""parallelrun: a declarative experiment runner for distributed training."""

__version__ = "0.1.0"
