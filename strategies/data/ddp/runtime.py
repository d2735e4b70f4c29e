"""The runtime of ddp: `BucketedRuntime`, whose sums are all-reduces of the backend, compressed if the plan says so."""

from ..common.reducer import BucketedRuntime

RUNTIME = BucketedRuntime
