"""AlexNet in one column (Krizhevsky 2014, arXiv 1404.5997), in the 61.1M-parameter form of torchvision.

Parallel over samples, pipeline stages and channels: tensor parallelism splits output and input channels in turn,
through the convolutions and the linear layers. Krizhevsky et al. 2012 gave each of two GPUs half of the channels too;
their second, fourth and fifth convolutions read those of one GPU only, which is another model than on one device.
"""
