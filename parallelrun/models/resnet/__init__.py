"""Residual networks (He et al. 2016): ResNet-18, ResNet-50, and the small one for CIFAR of the paper's section 4.2.

The stride of a bottleneck is on its 3x3 convolution, as in torchvision and most reports of "ResNet-50".

Parallel over samples and pipeline stages; BatchNorm takes its statistics over sets of samples that no plan changes.
Tensor parallelism has nothing to split: convolutions are not split by channels.
"""
