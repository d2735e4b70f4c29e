"""Not a model but a lesson: one matrix product, cut as data parallelism and as tensor parallelism cut it."""
