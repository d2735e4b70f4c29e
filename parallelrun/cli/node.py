"""This node's ranks of a job whose nodes Kubernetes or SkyPilot has started, each with the same command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallelrun.launch.host.cluster_node import Node

_VERBS = ("run", "verify", "bench")  # that have ranks


def run(words: Sequence[str]) -> int | None:
    """Start the ranks of this node, as torchrun would, and wait for them. Return their exit code; None if this process
    is no node of such a job, or `words` ask for no ranks."""
    if not (os.environ.get("PET_NNODES") or os.environ.get("SKYPILOT_NUM_NODES")):
        return None
    from parallelrun.cli import argv, help
    from parallelrun.launch.host import cluster_node
    from parallelrun.launch.host.environment import visible_gpus

    has_verb = words[:1] and words[0] in help.VERBS
    asks = argv.starts_ranks(list(words)) and (not has_verb or words[0] in _VERBS)
    node = cluster_node.detect(os.environ, visible_gpus()) if asks else None
    return None if node is None else _start(node, words)


def _start(node: Node, words: Sequence[str]) -> int:
    from parallelrun.base import stop_signals
    from parallelrun.base.wording import counted
    from parallelrun.launch.over_ssh.ssh_agent import start_ranks, supervise

    environ = {
        "WORLD_SIZE": str(node.world),
        "MASTER_ADDR": node.address,
        "MASTER_PORT": str(node.port),
    }
    place = f"node {node.index} of {node.num_nodes} ({node.source})"
    print(f"{place}: starting {counted(node.ranks_per_node, 'rank')}", file=sys.stderr, flush=True)
    signals: list[int] = []
    with stop_signals.handlers((signal.SIGINT, *stop_signals.STOP_SIGNALS), lambda number, _: signals.append(number)):
        return supervise(start_ranks(words, node.first_rank, node.ranks_per_node, environ), signals)
