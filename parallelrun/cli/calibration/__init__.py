"""`parallelrun calibrate`: measures this machine and fits the rates by which the time of a step is predicted.

`session` starts ranks that time products, copies, collectives (`devices`) and training steps (`worker`); `constants`
predicts each measurement with the code that predicts plans; `fit` chooses the constants; `file` writes the cluster.
"""
