"""Settings and events of torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable


def before_compiling(callback: Callable[[object], None]) -> None:
    """Call `callback` before torch.compile traces anything, if its front end is imported: torch.distributed.pipelining
    imports it, too, and then mostly nothing is compiled. What keeps a function out of graphs costs at each call."""
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.callback import callback_handler

        if callback not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(callback)


def keep_compiled_buffers() -> None:
    """Let compiled backward passes run more than once, for zero bubble; by default they reuse their buffers."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False
