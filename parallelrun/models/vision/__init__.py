"""Image classifiers: one torch-free description of an architecture gives both its spec and its modules."""
