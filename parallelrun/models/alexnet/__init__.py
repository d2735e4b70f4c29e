"""AlexNet in one column (Krizhevsky 2014, arXiv 1404.5997), in the 61.1M-parameter form of torchvision.

Parallel over samples and pipeline stages; tensor parallelism splits the two large linear layers, which hold most of the
parameters ("one weird trick"), not the convolutions.
"""
