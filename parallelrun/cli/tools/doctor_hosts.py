"""`doctor --hosts`: the bandwidth of an all-reduce between each two hosts, and which of them are slow.

`-H` or `--hostfile` starts one process on each host by ssh; under torchrun, srun or mpirun it uses the ranks that are
there, one on each host at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from typing import Any

from parallelrun.base.errors import EXIT_OK, ConfigError, Problem
from parallelrun.launch.host import environment, interfaces
from parallelrun.launch.host.environment import Attached
from parallelrun.launch.over_ssh import hosts as host_list
from parallelrun.launch.over_ssh.hosts import SshOptions
from parallelrun.launch.store import stores

FLAG = "--hosts"
NUM_BYTES = 2**24
SLOW = 0.5  # of the fastest pair's bandwidth
_REPEATS = 3
_PATIENCE_S = 120.0


def main(words: Sequence[str]) -> int:
    """`parallelrun doctor --hosts [-H a,b | --hostfile FILE]`. Raises ConfigError, EnvironmentProblem."""
    attached = environment.detect(os.environ)
    if attached is not None:
        return _measure(attached)
    parser = argparse.ArgumentParser("parallelrun doctor --hosts", description=__doc__)
    parser.add_argument("-H", dest="hosts", help="the hosts: a,b,c")
    parser.add_argument("--hostfile", help="a file with a host on each line")
    for name in ("port", "identity-file", "config"):
        parser.add_argument(f"--ssh-{name}", dest=name.replace("-", "_"), help="as for a run")
    options = parser.parse_args(list(words))
    hosts = host_list.place_ranks(None, options.hosts, options.hostfile)
    ssh = SshOptions(options.port, options.identity_file, options.config)
    problems = ssh.problems()
    if len(hosts) < 2:
        cause = "the bandwidth between hosts needs two of them"
        command = "parallelrun doctor --hosts -H a,b; or under torchrun, srun, mpirun"
        problems.append(Problem(cause, "command line", command=command))
    if problems:
        raise ConfigError(*problems)
    from parallelrun.launch.over_ssh import ssh as over_ssh

    one_each = [replace(host, first_rank=number, num_ranks=1) for number, host in enumerate(hosts)]
    return over_ssh.run(one_each, ["doctor", FLAG], ssh)


def _measure(attached: Attached) -> int:
    """As a rank: time the all-reduce of each pair of hosts; rank 0 prints the table."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    store = stores.connect(attached)
    if attached.master_port:
        os.environ.update(interfaces.socket_variables(os.environ, attached.master_addr))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", attached.local_rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    backend = "nccl" if on_gpu else "gloo"
    patience = timedelta(seconds=_PATIENCE_S)
    own = {"host": os.uname().nodename, "interface": os.environ.get("GLOO_SOCKET_IFNAME", "")}
    store.set(f"host/{attached.rank}", json.dumps(own))
    dist.init_process_group(
        backend, store=PrefixStore("pairs", store), rank=attached.rank, world_size=attached.world, timeout=patience
    )
    everyone = [json.loads(store.get(f"host/{rank}")) for rank in range(attached.world)]
    first = {member["host"]: rank for rank, member in reversed(list(enumerate(everyone)))}
    names = sorted(first, key=lambda name: first[name])
    values = torch.ones(NUM_BYTES // 4, device=device)
    for a, b in combinations(names, 2):
        pair = [first[a], first[b]]
        group = dist.new_group(pair, backend=backend)
        if attached.rank in pair:
            seconds = _time(values, group, on_gpu)
            if attached.rank == pair[0]:
                store.set(f"pair/{a}/{b}", str(8e-9 * NUM_BYTES / seconds))
        store.wait([f"pair/{a}/{b}"], patience)  # one pair at a time uses the network
    if attached.rank == 0:
        rates = {(a, b): float(store.get(f"pair/{a}/{b}")) for a, b in combinations(names, 2)}
        used = {member["host"]: member["interface"] for member in everyone}
        print("\n".join(report(names, rates, backend, used)), flush=True)
    _leave(store, attached)
    return EXIT_OK


def _time(values: Any, group: Any, on_gpu: bool) -> float:
    """The shortest of some all-reduces, in seconds."""
    import torch
    import torch.distributed as dist

    times = []
    for _ in range(1 + _REPEATS):
        values.fill_(1.0)
        began = time.perf_counter()
        dist.all_reduce(values, group=group)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _leave(store: Any, attached: Attached) -> None:
    """Leave together: rank 0 serves the store."""
    import torch.distributed as dist

    dist.destroy_process_group()
    stores.forget(attached)
    store.add("left", 1)
    deadline = time.monotonic() + _PATIENCE_S
    while attached.rank == 0 and store.add("left", 0) < attached.world and time.monotonic() < deadline:
        time.sleep(0.01)


def report(
    names: Sequence[str], rates: Mapping[tuple[str, str], float], backend: str, used: Mapping[str, str]
) -> list[str]:
    """The table of Gbit/s by pair, and the slow pairs; a host that is slow with all others is named alone.

    rates: by pair, in the order of `names`; used: the interface of each host.
    """
    if not rates:
        return [f"all ranks are on {names[0]}: there is no other host to measure"]
    width = max(8, *map(len, names))
    lines = [f"all-reduce of {NUM_BYTES >> 20} MiB between each two hosts over {backend}, in Gbit/s"]
    lines.append(" " * width + "".join(f"  {name:>{width}}" for name in names))
    for name in names:
        row = [rates.get((name, other), rates.get((other, name))) for other in names]
        lines.append(
            f"{name:<{width}}" + "".join(f"  {'-' if rate is None else f'{rate:.2f}':>{width}}" for rate in row)
        )
    best = max(rates.values())
    slow = [pair for pair, rate in rates.items() if rate < SLOW * best]
    guilty = [name for name in names if len(names) > 2 and all(pair in slow for pair in rates if name in pair)]
    if not slow:
        return [*lines, f"no pair is slower than {SLOW:.0%} of the fastest"]
    for name in guilty:
        rate = statistics.median(rates[pair] for pair in slow if name in pair)
        text = f"slow: {name} with every other host, {rate:.2f} of {best:.2f} Gbit/s"
        lines.append(f"{text}; its interface: {used.get(name) or 'not chosen'} (ethtool, NCCL_DEBUG=INFO)")
    rest = [pair for pair in slow if not set(pair) & set(guilty)]
    lines += [f"slow: {a} with {b}, {rates[a, b]:.2f} of {best:.2f} Gbit/s" for a, b in rest]
    return lines
