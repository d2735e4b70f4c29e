"""VGG (Simonyan and Zisserman 2015): stages of 3x3 convolutions with poolings between them; configuration D is VGG-16.

Parallel over samples and pipeline stages; tensor parallelism splits the two large linear layers, not the convolutions.
"""
