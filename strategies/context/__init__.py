"""Context parallelism: the cp ranks share every sequence, and their tokens attend to each other's.

`ring` passes keys and values from rank to rank, `allgather` gathers them, `ulysses` exchanges tokens for heads, `usp`
does so within groups and rings between them. `common` holds what they share.
"""
