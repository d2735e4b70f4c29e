"""A user's own nn.Module, trained under any plan: `model=module model.source=./net.py:build`.

`build` returns the module, written as for one device: it maps inputs (token ids (batch, seq), or features (batch,
*sample_shape)) to logits (batch, [seq,] vocab). It is called with `model.arguments`, and with `vocab`, `seq`, `hidden`,
`layers`, `heads` where its signature names them. The contract:

- Data-parallel strategies need nothing else.
- pp > 1 needs `model.blocks`, the ModuleList that is cut, and `model.before`, the modules that run before it; or
  `model.blocks` alone with all modules of forward, in order: `'model.blocks=[embed,layers.*,head]'`.
- tp > 1 needs `model.roles`, from module names or patterns to layer roles, for example
  `'model.roles={embed: embedding, "*.[qkv]": column_parallel, "*.out": row_parallel, "*.fc1": column_parallel,
  "*.fc2": row_parallel, head: head}'`. An nn.Linear can be column_parallel, row_parallel or head, an nn.Embedding
  embedding, an nn.LayerNorm or nn.RMSNorm norm. Forward uses no global sizes: heads by
  `unflatten(-1, (-1, head_dim))`.
- The module may say `sample_shape` (shape of one sample of features), `heads` and `kv_heads` as attributes.

nn.Dropout is replaced by dropout by hash, so that it is the same under every plan. The initial weights are the module's
own, built on CPU under the run's seed, for which the complete model must fit into a rank's memory for a moment.
"""
