"""The search for the fastest plan: all legal plans of a model on a cluster, priced and pruned.

`search` is the entry. `space` lists the candidates, `result` is what is found.
"""
