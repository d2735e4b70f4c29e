"""A lesson: ranks that hold only their blocks compute Y = X W, under data, 1D, 2D, 2.5D and 3D parallelism.

`parallelrun model=matmul strategy=ddp dp=2`, `strategy=tp tp=2` or `layout=2d tp=4` prints what every rank holds, sends
and computes, and checks it against one device. Nothing is trained.
"""
