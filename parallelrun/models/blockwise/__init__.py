"""Attention to blocks of keys, tile by tile: of sequences that several ranks hold, and of scores that torch's attention
does not know (sinks, soft caps).

`tiles.py` (torch-free): which tokens see each other; `blocks.py`: attention of one block; `transports.py`: how blocks
reach a rank; `product.py`: all of it as one autograd node; `attention.py`: the attention of a layer.
"""
