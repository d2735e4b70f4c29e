"""Tests of what precedes torch.compile, whose front end is imported here already. `test_shared_memory_graphs` has it
imported later."""

from __future__ import annotations

import torch

from parallelrun.distributed.torch_private import before_compiling, import_compiler


def test_a_callback_runs_before_every_first_trace_however_often_it_is_given() -> None:
    import_compiler()
    from torch._dynamo.callback import callback_handler

    calls = []

    def callback(_: object) -> None:
        calls.append(1)

    before_compiling(callback)
    before_compiling(callback)
    try:
        torch.compile(lambda x: x * 3 + 1, backend="eager")(torch.ones(2))
    finally:
        callback_handler.start_callbacks.remove(callback)
    assert calls == [1]
