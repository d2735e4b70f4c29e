"""The place of a node in a job of Kubernetes or SkyPilot, from their variables."""

from __future__ import annotations

import pytest

from parallelrun.base.errors import EnvironmentProblem
from parallelrun.launch.host import cluster_node
from parallelrun.launch.host.cluster_node import Node

PET = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-node-0-0.job",
       "PET_MASTER_PORT": "29400"}  # fmt: skip
SKY = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
       "SKYPILOT_NUM_GPUS_PER_NODE": "8"}  # fmt: skip


def test_kubeflow_trainer_s_pods():
    found = cluster_node.detect(PET, 0)
    assert found == Node(2, 3, 4, "job-node-0-0.job", 29400, "Kubernetes")
    assert (found.first_rank, found.world) == (8, 12)


@pytest.mark.parametrize(("given", "gpus", "ranks"), [("auto", 8, 8), ("gpu", 2, 2), ("auto", 0, 1), ("cpu", 8, 1)])
def test_the_ranks_of_a_pod_without_a_number_are_its_gpus(given, gpus, ranks):
    assert cluster_node.detect({**PET, "PET_NPROC_PER_NODE": given}, gpus).ranks_per_node == ranks


def test_skypilot_s_nodes():
    assert cluster_node.detect(SKY, 0) == Node(1, 2, 8, "10.0.0.1", cluster_node.PORT, "SkyPilot")
    assert cluster_node.detect({**SKY, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}, 0).ranks_per_node == 1


@pytest.mark.parametrize(
    "environ",
    [{}, {**PET, "PET_NNODES": "1"}, {**SKY, "SKYPILOT_NUM_NODES": "1"}, {**PET, "RANK": "0", "WORLD_SIZE": "12"}],
)
def test_one_node_and_the_ranks_of_torchrun_are_no_such_job(environ):
    assert cluster_node.detect(environ, 8) is None


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        ({**PET, "PET_NNODES": "1:3"}, "PET_NNODES=1:3: a number of nodes that may change needs torchrun"),
        ({**PET, "PET_NNODES": "01"}, "this is node 2 of 1, counted from 0"),
        ({**PET, "PET_NNODES": "0"}, "PET_NNODES=0 is not a whole number from 1"),
        ({**PET, "PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR is not"),
        ({**PET, "PET_NODE_RANK": "3"}, "this is node 3 of 3, counted from 0"),
        ({**PET, "PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE=many is not a whole number from 1"),
        ({**SKY, "SKYPILOT_NODE_IPS": ""}, "SKYPILOT_NODE_IPS is not"),
        ({**SKY, "SKYPILOT_NODE_RANK": ""}, "SKYPILOT_NODE_RANK is not"),
    ],
)
def test_what_is_missing_or_wrong_is_named(environ, what):
    with pytest.raises(EnvironmentProblem, match=what):
        cluster_node.detect(environ, 0)
