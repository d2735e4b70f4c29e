"""What several data-parallel strategies share: buckets of gradients, sharding, compression, all-reduce algorithms."""
