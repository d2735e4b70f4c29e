"""What tensor strategies share: traffic and memory by layer, checks, the split loss, sharding of networks."""
