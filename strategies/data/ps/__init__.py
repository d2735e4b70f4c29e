"""Parameter server: servers own the weights and the optimizer's state, workers compute gradients.

Papers: Dean et al. 2012 (DistBelief, asynchronous), Li et al. 2014 (sharded servers), Ho et al. 2013 (SSP: stale
synchronous parallel), Chen et al. 2016 (synchronous with backup workers).

Idea:
1. The last ranks are servers. `shards.py` cuts large tensors into rows and gives each row to one server.
2. In each step a worker computes the gradient of its samples, pushes every server its rows, and pulls the new weights.
3. `consistency=sync`: a server averages the gradients of all workers (less `backup_workers`) into one update.
4. `consistency=async`: every push is an update of its own. `ssp`: the same, but no worker starts a step while it is
   more than `staleness` clocks ahead of the slowest.
5. Every update is one line of `apply_log.jsonl`, so that a run without a fixed order can be replayed exactly.

Cost: a worker sends and receives each weight once per step. A server sends and receives its shards once per worker, so
its link is the busiest: `protocol.py` has the closed form. Workers hold no optimizer state.

Proof: sync without backup workers equals one device. Everything else equals the replay of its own apply log, bit for
bit (`reference.py`). Tests: tests/ranks/test_ps.py, tests/cli/test_ps_failures.py.

Files: plan.py (settings, checks, prediction), shards.py, protocol.py (messages and traffic), apply_log.py and
synchronization.py are torch-free. connections.py sends and receives, store.py holds a server's shards, server.py and
worker.py are the two roles, metrics.py writes the records, runtime.py is the entry, reference.py the proof.
"""
