"""Mixture of experts: a router and experts in place of an MLP (GShard, Switch, Mixtral, DeepSeek-V3, expert choice).

`routing.py` decides which expert gets which token; `rows.py` sorts the tokens by expert and sums the results;
`experts.py` is the same MLP many times; `layer.py` puts them together.
"""
