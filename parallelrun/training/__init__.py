"""The training of one rank: loop, metrics, looking for silent corruption, `verify`, and inference."""
