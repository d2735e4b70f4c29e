"""The proof that a plan trains as one device.

Called, as `parallelrun.verify("tp=2")`, it is `parallelrun.api.verify`.
"""

import sys

from parallelrun.callable_package import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
