"""What alexnet, vgg and resnet share: architectures as data, from which spec and modules are built, and BatchNorm."""
