"""Which launcher started this process, from its variables: torchrun, srun, mpirun, or none."""

from __future__ import annotations

import os

import pytest

from parallelrun.base.errors import EnvironmentProblem
from parallelrun.launch.host.environment import Attached, detect, first_host, for_rank, threads_per_rank, visible_gpus

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "job1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}, None),  # many images set these for everybody
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # a bare sbatch or salloc shell
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun -n1: we launch
        (TORCHRUN, Attached(3, 4, 1, "node7", 29500, "torchrun", "abc-0")),
        ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}, Attached(3, 4, 1, "node7", 29500, "torchrun", "abc-2")),
        ({**SRUN, **TORCHRUN}, Attached(3, 4, 1, "node7", 29500, "torchrun", "abc-0")),  # srun starts torchrun
        (OPENMPI, Attached(1, 4, 1, "127.0.0.1", 0, "mpirun", "job1")),
        (
            {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1234"},
            Attached(1, 4, 1, "n1", 1234, "mpirun", "job1"),
        ),
        (
            {"PMI_RANK": "2", "PMI_SIZE": "3"},
            Attached(2, 3, 2, "127.0.0.1", 0, "mpirun", "parent-4711"),
        ),
        (
            {**SRUN, "SLURM_STEP_NUM_NODES": "1"},
            Attached(5, 8, 1, "127.0.0.1", 0, "srun", "77.0"),
        ),
        ({**SRUN, "SLURM_STEP_RESV_PORTS": "12001-12002"}, Attached(5, 8, 1, "gpu003", 12001, "srun", "77.0")),
    ],
)
def test_the_place_of_a_rank_is_read_from_its_launcher(environ, expected, monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 4711)
    assert detect(environ) == expected


def test_srun_on_several_hosts_derives_one_port_from_the_job():
    places = [detect({**SRUN, "SLURM_PROCID": str(rank)}) for rank in range(8)]
    assert {(place.master_addr, place.master_port) for place in places} == {("gpu003", places[0].master_port)}
    assert 20000 <= places[0].master_port < 30000
    assert detect({**SRUN, "SLURM_STEP_ID": "1"}).master_port != places[0].master_port


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["RANK=0", "WORLD_SIZE=2", "MASTER_ADDR"]),
        ({"TORCHELASTIC_RUN_ID": "x"}, ["TORCHELASTIC_RUN_ID=x", "RANK"]),
        ({**TORCHRUN, "RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK=-1"]),
        ({**TORCHRUN, "LOCAL_RANK": "9"}, ["LOCAL_RANK=9"]),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
        ({**TORCHRUN, "MASTER_PORT": "0"}, ["MASTER_PORT=0"]),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, ["WORLD_SIZE=four"]),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "", "SLURM_PROCID": "1"}, ["RANK=3", "SLURM_PROCID=1"]),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": ""}, ["OMPI_COMM_WORLD_SIZE"]),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ["MASTER_ADDR", "MASTER_PORT"]),
        ({**SRUN, "SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NODELIST", "MASTER_ADDR"]),
        ({"PMI_RANK": "3", "PMI_SIZE": "3"}, ["PMI_RANK=3", "PMI_SIZE=3"]),
    ],
)
def test_variables_that_cannot_be_true_are_refused_by_name(environ, named):
    with pytest.raises(EnvironmentProblem) as caught:
        detect(environ)
    assert caught.value.exit_code == 3
    (problem,) = caught.value.problems
    assert all(name in problem.what for name in named), problem.what


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu003", "gpu003"),
        ("gpu003,gpu009", "gpu003"),
        ("gpu[003-005,9],x1", "gpu003"),
        ("rack1-n[07,09]-ib", "rack1-n07-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes, first):
    assert first_host(nodes) == first


def test_a_rank_gets_what_it_needs_and_nothing_of_another_launcher():
    kept = {"PATH": "/bin", "HOME": "/root", "LC_ALL": "C", "HF_HOME": "/hf", "CUDA_VISIBLE_DEVICES": "0"}
    secret = {"AWS_SECRET_ACCESS_KEY": "s", "MY_TOKEN": "s"}
    stale = {"MASTER_ADDR": "old", "TORCHELASTIC_RUN_ID": "old", "PMI_RANK": "7", "SLURM_PROCID": "2"}
    assert for_rank({**kept, **secret, **stale}, 1, 4, 2) == {
        **kept,
        "OMP_NUM_THREADS": "2",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
    }


def test_ranks_share_the_cores_and_the_user_s_wish_wins(monkeypatch):
    monkeypatch.setattr("parallelrun.launch.host.environment.num_cores", lambda: 8)
    assert [threads_per_rank({}, ranks) for ranks in (1, 2, 3, 8, 32)] == [8, 4, 2, 1, 1]
    assert threads_per_rank({"OMP_NUM_THREADS": "5"}, 8) == 5
    assert threads_per_rank({"OMP_NUM_THREADS": "0"}, 8) == 1


def test_gpus_are_counted_without_torch(monkeypatch):
    monkeypatch.setattr("parallelrun.launch.host.environment._torch_is_cpu_only", lambda: False)
    monkeypatch.setattr(os, "listdir", lambda folder: ["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "null"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == 3
    for listed, expected in (("0,1", 2), ("", 0), ("1,-1,0", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert visible_gpus() == expected
    monkeypatch.setattr("parallelrun.launch.host.environment._torch_is_cpu_only", lambda: True)
    assert visible_gpus() == 0
