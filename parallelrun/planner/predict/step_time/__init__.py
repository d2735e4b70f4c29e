"""How long a step of a plan takes on a cluster, as a sum of named parts.

`step` is the entry: it adds up what `blocks` say of computation and of tensor, context and expert communication, lets
`simulate` place it in the pipeline's schedule, and adds the communication of the data strategy that no computation
hides, and the optimizer. `kernels` and `links` turn sizes into seconds by the rates of a cluster (`rates`).
"""
