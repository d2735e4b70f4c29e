"""`resume=latest` runs no code that only the run directory names."""

from __future__ import annotations

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.cli import resume
from parallelrun.config.keys import CODE_KEYS
from tests.plans import tiny_config


@pytest.mark.parametrize("key", CODE_KEYS)
def test_code_of_a_saved_run_is_named_again_by_the_user(key):
    config = tiny_config({key: "./theirs.py:function"})
    with pytest.raises(ConfigError, match="must be named on the command line"):
        resume._refuse_code(config, frozenset())
    resume._refuse_code(config, frozenset({key}))
