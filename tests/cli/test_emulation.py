"""Runs on emulated hosts: what carries their collectives, who is blamed, and what is left of the hosts."""

from __future__ import annotations

import json
import os
import signal
import socket

from tests.cli.launcher import run_launcher
from tests.namespaces import needs_namespaces

TWO_HOSTS = {"dp": 4, "emulate": True, "cluster.gpus_per_node": 2, "cluster.inter_gb_s": 0.5}


@needs_namespaces
def test_ranks_run_on_their_hosts_and_a_killed_one_is_blamed_there(tmp_path):
    run = run_launcher(tmp_path, {"steps": 100_000}, overrides=TWO_HOSTS)
    run.reaches(3)
    pids = run.rank_pids()
    networks = [os.readlink(f"/proc/{pid}/ns/net") for pid in pids]
    assert networks[0] == networks[1] != networks[2] == networks[3]
    assert os.readlink("/proc/self/ns/net") not in networks
    os.kill(pids[2], signal.SIGKILL)
    assert run.wait() == 6, run.stderr
    assert "emulated network: 2 hosts of 2 ranks, ports of 200 MB/s" in run.stderr, run.stderr
    assert "rank 2 (dp=2 tp=0 pp=0, host1," in run.stderr


@needs_namespaces
def test_a_run_over_emulated_hosts_uses_gloo_and_leaves_no_interface(tmp_path):
    interfaces = socket.if_nameindex()
    run = run_launcher(tmp_path, overrides={**TWO_HOSTS, "steps": 1}, worker="parallelrun.launch.ranks.worker:run")
    assert run.wait() == 0, run.stderr
    assert json.loads((run.directory / "summary.json").read_text())["backend"] == "gloo"
    assert socket.if_nameindex() == interfaces
