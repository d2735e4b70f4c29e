"""Shared by data-parallel strategies: buckets of gradients, sharding, compression, all-reduce algorithms."""
