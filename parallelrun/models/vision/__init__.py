"""Shared by alexnet, vgg and resnet: architectures as data, from which spec and modules are built, and BatchNorm."""
