"""A user's own nn.Module, trained under any plan: `model=module model.source=./net.py:build`.

`build` returns the module, written as for one device: it maps inputs (token ids (batch, seq), or features (batch,
*sample_shape)) to logits (batch, [seq,] vocab). It is called with `model.arguments`, and with `vocab`, `seq`, `hidden`,
`layers`, `heads` where its signature names them. The contract:

- Data strategies need nothing else.
- pp > 1 needs `model.blocks`, the modules whose chain is forward, in order: `'model.blocks=[embed,layers.*,head]'`.
- tp > 1 needs `model.roles`, from module names or patterns, for example
  `'model.roles={embed:embedding,*.q:columns,*.k:columns,*.v:columns,*.out:row,*.fc1:columns,*.fc2:row,head:head}'`.
  nn.Linear can be columns, row or head; nn.Embedding, embedding; nn.LayerNorm and nn.RMSNorm, norm. Forward uses no
  global sizes: heads by `unflatten(-1, (-1, head_dim))`.
- The module may say `sample_shape` (shape of one sample of features), `heads` and `kv_heads` as attributes.

nn.Dropout is replaced by dropout by hash, so that it too is the same under every plan. Initial weights are the module's
own, built on CPU under the run's seed; that needs the whole model in a rank's memory for a moment.
"""
