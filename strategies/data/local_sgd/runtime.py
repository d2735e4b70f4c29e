"""The runtime of local SGD: every few steps weights become their mean over dp; the optimizer's state stays local."""

from __future__ import annotations

from ..common.independent_runtime import IndependentRuntime


class LocalSGDRuntime(IndependentRuntime):
    """Averages the weights."""

    def synchronise(self) -> None:
        self.average(self._weights)


RUNTIME = LocalSGDRuntime
