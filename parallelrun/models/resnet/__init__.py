"""Residual networks (He et al. 2016): ResNet-18, ResNet-50, and the small one for CIFAR of the paper's section 4.2.

The stride of a bottleneck is on its 3x3 convolution, as in torchvision and most reports of "ResNet-50".

Parallel over samples, pipeline stages and channels; BatchNorm takes its statistics over sets of samples that no plan
changes. Tensor parallelism splits the last two convolutions of each block and the norm between them, not the stem, the
shortcuts, a bottleneck's first convolution and the classifier, which have no partner.
"""
