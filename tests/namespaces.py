"""Tests in network namespaces: only where this process may create them."""

from __future__ import annotations

import pytest

from parallelrun.launch.host import emulation

needs_namespaces = pytest.mark.skipif(bool(emulation.missing()), reason=emulation.missing() or "can create namespaces")
