"""A residual stack of MLPs: the smallest model with a column-parallel and a row-parallel layer.

On `dataset=synthetic` a sample is a vector of `hidden` features and the model predicts its class. On images the
features are the pixels, so `hidden` must be their number (digits: 64). On tokens each one predicts the next by itself,
so the model learns only how often tokens follow one another.

Parallel as gpt, but without attention heads and experts.
"""
