"""Data parallelism: replicas train on different samples and combine their gradients or weights."""
