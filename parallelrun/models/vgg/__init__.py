"""VGG (Simonyan and Zisserman 2015): stages of 3x3 convolutions with poolings between them; configuration D is VGG-16.

Parallel over samples, pipeline stages and channels: tensor parallelism splits output and input channels in turn,
through the convolutions and the linear layers.
"""
