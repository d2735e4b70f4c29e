"""The words of the command line: verbs, tools, flags of ours and of Hydra. No Hydra, no torch."""

from __future__ import annotations

VERBS = {
    "run": "train (the default verb)",
    "plan": "show what would happen: mesh, memory, schedule, traffic; starts nothing",
    "explain": "show every message of the plan's strategies, as text, --json or plot=NAME; starts nothing",
    "verify": "prove that the training equals one device",
    "bench": "warm up, time steps, write bench.json",
}
TOOLS = {
    "ls": "list recipes, models, strategies, datasets, optimizers, precisions, clusters",
    "show": "print a recipe's composed configuration",
    "doctor": "check this machine: torch, GPUs, memory, loopback, an all-reduce of two ranks and one of all GPUs",
    "tokenize": "write Megatron .bin/.idx token files from text",
}
# --ssh-...: how ssh reaches the hosts of -H.
OUR_FLAGS = (
    "--json", "-v", "--verbose", "--trust", "--version", "--help",
    "-np", "-H", "--ssh-port", "--ssh-identity-file", "--ssh-config",
)  # fmt: skip
# Hydra's, with whether a value follows:
HYDRA_FLAGS = {
    "--hydra-help": False,
    "--run": False,
    "-r": False,
    "--multirun": False,
    "-m": False,
    "--cfg": True,
    "-c": True,
    "--resolve": False,
    "--package": True,
    "-p": True,
    "--shell-completion": False,
    "-sc": False,
    "--config-path": True,
    "-cp": True,
    "--config-name": True,
    "-cn": True,
    "--config-dir": True,
    "-cd": True,
    "--info": None,  # a value may follow
    "-i": None,
}
PICKLE_FLAG = "--experimental-rerun"  # Hydra's: it unpickles a file, which runs whatever that file says
CFG_VALUES = ("job", "hydra", "all")
INFO_VALUES = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath", "aliases")
