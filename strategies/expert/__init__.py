"""Expert parallelism: the experts of a layer are spread over the ep ranks, and tokens travel to their experts and back.

`capacity` sends equal messages (GShard); `dropless` sends exactly the tokens that are routed (MegaBlocks). `common`
holds what both share: checks, predicted traffic and memory (`plan.py`), the all-to-all as autograd nodes
(`all_to_all.py`), reordering rows and sending them over one or two levels (`rows.py`), and the sequence of dispatch,
experts and combine with its overlap (`dispatcher.py`).
"""
