"""A package outside this repository that adds a data strategy, a tensor layout, a model and a dataset.

`docs/how_to_add.md` explains these files; `tests/cli/test_plugin.py` installs, plans, runs and verifies them.
"""
