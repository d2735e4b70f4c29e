"""All-reduce algorithms on point-to-point messages: ring, halving-doubling, hierarchical, tree."""
