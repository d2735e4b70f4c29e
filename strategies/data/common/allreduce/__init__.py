"""All-reduce written out on point-to-point messages: ring, halving-doubling, hierarchical (not a way of its own)."""
