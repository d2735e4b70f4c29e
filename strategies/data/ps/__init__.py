"""Parameter server: servers own the weights and the optimizer's state, workers compute gradients.

Paper: Li et al. 2014 (sharded servers); Dean et al. 2012 (asynchronous); Ho et al. 2013 (SSP, stale synchronous
parallel); Chen et al. 2016 (synchronous with backup workers).

1. The last ranks are servers. Large tensors are cut by rows, and each server owns about equally many bytes of shards.
2. In each step a worker computes the gradient of its samples, pushes every server its rows, and pulls the new weights.
3. `consistency=sync`: a server averages the gradients of all workers (less `backup_workers`) into one update.
4. `consistency=async`: every push is an update of its own. `ssp`: the same, but no worker starts a step while it is
   more than `staleness` clocks ahead of the slowest.
5. A worker may be several ranks (tp, pp, cp, ep; DistBelief's workers were model parallel, Dean et al. 2012): they sum
   gradients of copies, then each exchanges its own part of the model with the servers that own it (Li et al. 2014).
   Steps, versions and staleness are counted for the worker.
6. Every update is one line of `apply_log.jsonl`, so that a run can be replayed although its order is not fixed.

Costs: a worker sends each gradient once per step, and each of its ranks receives the weights that it holds. A server
exchanges its shards with every worker, so its link is the busiest (closed form in plan.py). Workers hold no optimizer
state.
Proof: exact for sync without backup workers; else a replay of its apply log (bit for bit: reference.py,
tests/ranks/test_ps.py, tests/cli/test_ps_failures.py).

Files: plan.py, shards.py, protocol.py (headers of messages), apply_log.py and synchronization.py are torch-free.
connections.py (servers) and client.py (workers) send and receive, store.py has a server's shards, server.py and
worker.py are the two roles, runtime.py is the entry.
"""
