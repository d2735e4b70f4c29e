"""Shared by tensor strategies: traffic and memory by layer, checks, the split loss, sharding of networks."""
