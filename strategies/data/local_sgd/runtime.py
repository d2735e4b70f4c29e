"""The runtime of local SGD: every few steps weights become their mean over dp; the optimizer's state stays local."""

from ..common.independent_runtime import IndependentRuntime

RUNTIME = IndependentRuntime
