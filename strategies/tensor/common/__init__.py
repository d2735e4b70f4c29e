"""What several tensor-parallel strategies share: traffic and memory by layer, the split loss, sharding of networks."""
