"""A residual stack of MLPs: the smallest model with a column and a row layer. On `synthetic` it classifies features."""
