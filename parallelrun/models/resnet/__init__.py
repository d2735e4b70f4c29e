"""Residual networks (He et al. 2016): ResNet-18 and -50, and a small one with the stem used for CIFAR."""
