"""The planner. Called, as `parallelrun.plan("model=gpt", "tp=2")`, it is `parallelrun.api.plan`."""

import sys

from parallelrun.callable_package import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
