"""The GPT-2/3 family (Radford et al. 2019; Brown et al. 2020) and, by options, the Llama family (Touvron et al. 2023).

A pre-LN decoder: each block adds attention of the norm of x, then the MLP of the norm of x. `position=rope`,
`norm=rmsnorm`, `activation=swiglu`, `kv_heads`, `bias=false` and `tied_embeddings=false` make it a Llama;
`model.experts` puts a mixture of experts in place of some MLPs.

Parallel along every axis: blocks are cut into pipeline stages; heads, the inner width of the MLP and the vocabulary are
split by tensor parallelism, the sequence by sequence parallelism, experts by expert parallelism.
"""
