"""The words of the command line (verbs, tools, flags) and the help texts.

A test plans every example, so that none of them is ever wrong.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence

from parallelrun.base.errors import EXIT_CONFIG, EXIT_OK
from parallelrun.base.wording import COLUMNS
from parallelrun.config import presets
from parallelrun.config.keys import GROUPS

VERBS = {
    "run": "train (the default verb)",
    "plan": "predict mesh, memory, schedule and traffic; starts nothing",
    "explain": "show every message of the plan's strategies, as text, --json or plot=NAME; starts nothing",
    "verify": "check that the training equals training on one device",
    "bench": "warm up, time steps, write bench.json",
}
_TOOL_TABLE = {  # tool -> (its module and function, what it does)
    "ls": ("cli.tools.listing:ls",
        "list recipes, models, strategies, datasets, optimizers, precisions, clusters, trackers; ls keys, cells"),
    "show": ("cli.tools.listing:show", "print a recipe's composed configuration"),
    "recipes": ("cli.tools.gallery:main", "recipes ls, cp, validate: list, copy and check recipes"),
    "runs": ("cli.tools.runs:runs", "runs ls, show: list run directories; show one of them"),
    "compare": ("cli.tools.runs:compare",
        "compare runs: configuration, plan, versions, losses, speed, memory, bytes; --fail-on for CI"),
    "report": ("cli.tools.runs:report", "write one HTML page about runs or a sweep, readable without a network"),
    "plot": ("cli.tools.runs:plot",
        "draw one result against a key for a paper: --x world --y tokens_per_s --by strategy --to FILE.pdf"),
    "slurm": ("cli.tools.job_file:slurm",
        "print a batch file of Slurm for a run: slurm KEY=VALUE ... nodes= gpus_per_node= time= [--submit]"),
    "k8s": ("cli.tools.job_file:k8s",
        "print a TrainJob of Kubernetes for a run: k8s KEY=VALUE ... nodes= gpus_per_node= image= claim="),
    "sky": ("cli.tools.job_file:sky",
        "print a task of SkyPilot for a run: sky KEY=VALUE ... nodes= accelerator= gpus_per_node= bucket="),
    "doctor": ("cli.tools.doctor:main",
        "check this machine: torch, GPUs, memory, an all-reduce of two ranks and one of all GPUs"),
    "calibrate": ("cli.tools.calibrate:main",
        "measure this machine and write cluster=mine, from which plan predicts step times"),
    "tokenize": ("data.tokenizing.tokenize:main",
        "write Megatron .bin/.idx token files from text, jsonl, parquet or arrow, with any tokenizer.json"),
    "export": ("cli.tools.weights:export",
        "write a run's weights for other programs: Hugging Face, safetensors, torch.save"),
    "generate": ("cli.tools.inference:generate",
        "continue a text: generate RUN TEXT [max_tokens= temperature= top_k= tp=]"),
    "eval": ("cli.tools.inference:evaluate",
        "print perplexity, bits per byte and top-1 accuracy of a run: eval RUN [dataset= path= split= samples=]"),
    "import": ("cli.tools.weights:import_weights",
        "convert a Hugging Face directory or an export to a checkpoint from which training starts"),
    "import-flags": ("cli.tools.import_flags:main",
        "translate settings of Megatron-LM, torchtitan, DeepSpeed or accelerate to a recipe: import-flags FILE"),
}  # fmt: skip
TOOLS = {tool: text for tool, (_, text) in _TOOL_TABLE.items()}
TOOL_FUNCTIONS = {tool: function for tool, (function, _) in _TOOL_TABLE.items()}
# The kinds that `ls` lists -> their configuration groups; the group's name is understood too.
KINDS = {
    "recipes": "recipe",
    "models": "model",
    "strategies": "strategy",
    "datasets": "dataset",
    "optimizers": "optimizer",
    "precisions": "precision",
    "clusters": "cluster",
    "stacks": "stack",
}
TRACKERS = "trackers"  # no configuration group: several at once
ON_REQUEST = KEYS, CELLS = "keys", "cells"  # what `ls` lists only if it is named: there are many
# Our flags and the names of their values in `argv.read`: switches, and flags that a value follows.
SWITCHES = {"--json": "json", "-v": "verbose", "--verbose": "verbose", "--trust": "trust"}
VALUED = {"-np": "ranks", "-H": "hosts", "--hostfile": "hostfile", "-hostfile": "hostfile",
          "--ssh-config": "ssh_config"}  # fmt: skip
OUR_FLAGS = (*SWITCHES, *VALUED, "--version", "--help")
# Hydra's flags, and whether a value follows (None: it may).
HYDRA_FLAGS = {
    **dict.fromkeys(("--hydra-help", "--run", "-r", "--multirun", "-m", "--resolve"), False),
    **dict.fromkeys(("--shell-completion", "-sc"), False),
    **dict.fromkeys(("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"), True),
    **dict.fromkeys(("--config-dir", "-cd"), True),
    **dict.fromkeys(("--info", "-i"), None),
}
PICKLE_FLAG = "--experimental-rerun"  # Hydra's; it unpickles a file, which can run any code
CFG_VALUES = ("job", "hydra", "all")
INFO_VALUES = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath", "aliases")

EXAMPLES = (
    ("parallelrun model=gpt strategy=ptdp tp=2 pp=2", "train a small GPT on 4 ranks of this machine"),
    ("parallelrun plan model=gpt3_175b strategy=ptdp tp=8 pp=64 dp=6", "predict a run on 3072 GPUs"),
    ("parallelrun verify model=gpt strategy=ptdp dp=2 tp=2 pp=2", "check it against one device"),
    ("parallelrun explain strategy=ring world=4", "list the messages of a ring all-reduce"),
    ("parallelrun bench model=moe_gpt strategy=gshard dp=2 ep=2", "time expert parallelism"),
    ("parallelrun -m model=gpt strategy=ddp,tp,gpipe,ptdp world=4 steps=20", "compare strategies"),
    ("parallelrun plan recipe=gpt3_oneflow_3072", "use a complete run from a shared recipe"),
)

SHORT = """parallelrun: one command composes a model, a dataset and a parallelism plan, and trains.

  parallelrun model=gpt strategy=ptdp tp=2 pp=2     train a small GPT on 4 ranks of this machine
  parallelrun recipe=quickstart                     the shortest complete run
  parallelrun plan model=gpt3_175b tp=8 pp=64 dp=6  predict memory, traffic and time before a run
  parallelrun ls                                    list models, strategies, datasets, recipes, ...
  parallelrun --help                                everything else"""

_FLAGS = {
    "-m, --multirun": "sweep over every combination of comma-separated values, with one table at the end",
    "--json": "print one JSON document and nothing else (all verbs; ls, show, runs, compare, doctor)",
    "-v, --verbose": "show tracebacks",
    "--trust": "allow a recipe to name code and to write anywhere",
    "-np N": "number of ranks, as in horovodrun",
    "-H h1:4,h2:4": "hosts with their slots, which ranks fill in order; ssh reaches other hosts",
    "--hostfile FILE": "the hosts from a file: `h1 slots=4` or `h1:4` on each line",
    "--ssh-config F": "the configuration of ssh (its -F): ports, keys, names of hosts",
    "--cfg job, --info, -p, --config-dir, -sc install=bash": "flags of Hydra; --hydra-help explains them",
    "--version": "print the version",
    "-h, --help": "print this text; after a verb or tool, its own help",
}

_KEYS = {
    "degrees": "world (or gpus) dp cp tp pp ep",
    "batch": "global_batch local_batch micro_batch microbatches",
    "schedule": "schedule virtual_stages layout strategy.data.* strategy.tensor.* strategy.pipeline.*",
    "data": "path tokenizer dataset.column split append_eod mixture val_fraction ...",
    "model": "model.layers hidden heads kv_heads ffn vocab seq ...",
    "experts": "model.experts expert_ffn expert_period shared_experts, model.router.* strategy.expert.*",
    "optimizer": "optimizer.lr schedule warmup weight_decay clip ...",
    "run": "steps seed dropout recompute loss_chunks compile device name path runs",
    "init": "init.from=DIR (initial weights), model.from_hf=config.json (a model of Hugging Face transformers)",
    "resume": "resume=latest (the newest run) | auto (this training, or a fresh start) | DIR",
    "records": "eval.every eval.batches checkpoint.every keep last, profile=[STEPS]",
    "trackers": "tracker=tensorboard, tracker=[wandb,mlflow], tracker.project name group tags",
}

# Verb -> the keys that matter to it most, for `parallelrun VERB --help`.
_KEYS_OF = {
    "run": {
        "strategy=auto": "search all plans for the fastest that fits, then run it",
        "resume=latest": "continue the newest run; resume=auto: this training, or start fresh",
        "restarts=3": "replace ranks that fail, up to 3 times; elastic=true: continue with fewer ranks",
    },
    "plan": {
        "(no strategy)": "search all plans for the fastest: gpus=64 cluster=...; objective=time|cost|gpus days=30",
        "detail=SECTION,...": "sections to add: ranks stages schedule traffic data_axis layouts, or all",
        "explain=true": "parts of a step, its limits, and where another plan is faster",
        "tokens=300e9": "days and price of a training with this many tokens",
        "plot=NAME": "costs of the data axis, as NAME.svg and NAME.csv",
        "mtbf_gpu_hours=50000": "useful part of the time with failures; add checkpoint_gb_s=20",
    },
    "explain": {
        "plot=NAME": "every message, as NAME-data.svg, NAME-tensor.svg, ...",
    },
    "verify": {
        "shrink=true": "check a smaller plan with the same structure, if the plan is too large for this machine",
        "verify.optimizer=same": "report weight updates of the run's optimizer instead of checking those of plain SGD",
    },
    "bench": {
        "bench.warmup=3": "number of steps before timing starts",
        "bench.steps=20": "number of timed steps",
    },
}

_EXIT_CODES = (
    "Exit codes: 0 ok, 1 run failed, 2 usage or configuration, 3 environment or capacity, 4 mismatch or bad "
    "checkpoint, 5 numerics, 6 a rank died, 7 hang, 8 no progress in three attempts, 9 a rank has wrong memory or "
    "results again, 75 preempted and saved, 130 Ctrl-C, 143 SIGTERM."
)


_MORE = (
    "Every verb takes the keys of a run: `parallelrun --help` lists them, `parallelrun ls keys` explains each. "
    "--json prints one JSON document, -m predicts or runs every combination of comma-separated values."
)


def answered(words: Sequence[str], text: str | Callable[[], str]) -> int | None:
    """Print the help of a tool if it was asked for, or on stderr if the tool was given nothing, as argparse does.
    Return the exit code; None if there are words to act on."""
    if words and not {"-h", "--help"} & set(words):
        return None
    print(text if isinstance(text, str) else text(), file=sys.stdout if words else sys.stderr)
    return EXIT_OK if words else EXIT_CONFIG


def full() -> str:
    """The text of `parallelrun --help`, as wide as the terminal."""
    width = max(len(word) for word in (*VERBS, *TOOLS))
    lines = ["parallelrun [verb] key=value ...", "", "Verbs (all take the same overrides; VERB --help has more):"]
    lines += _table(VERBS, width)
    lines += ["", "Tools (TOOL --help has more):", *_table(TOOLS, width)]
    lines += ["", "Groups (group=option; `parallelrun ls` describes them):"]
    lines += _table({group: " ".join(presets.options(group)) for group in GROUPS}, 9)
    lines += ["", "Keys (key=value; `parallelrun ls keys` explains each):", *_table(_KEYS, 9)]
    lines += ["", "Flags:", *_table(_FLAGS, 15), "", "Examples:"]
    lines += [f"  {command}\n      {text}" for command, text in EXAMPLES]
    return "\n".join([*lines, "", *textwrap.wrap(_EXIT_CODES, _columns())])


def of_verb(verb: str) -> str:
    """The text of `parallelrun VERB --help`, as wide as the terminal."""
    about = f"{VERBS[verb][0].upper()}{VERBS[verb][1:]}."
    lines = [f"parallelrun {verb} key=value ...", "", *textwrap.wrap(about, _columns()), ""]
    lines += ["Keys and values:", *_table(_KEYS_OF[verb], 20), "", "Examples:"]
    own = [word for word in VERBS if word != "run"]
    for command, text in EXAMPLES:
        of_command = next((word for word in own if f" {word} " in command), "run")
        if of_command == verb:
            lines.append(f"  {command}\n      {text}")
    lines += ["", *textwrap.wrap(_MORE, _columns(), break_on_hyphens=False)]
    return "\n".join(lines)


def _columns() -> int:
    return max(60, min(shutil.get_terminal_size((COLUMNS + 1, 24)).columns, 120)) - 1


def _table(texts: Mapping[str, str], width: int) -> list[str]:
    """Lines of two columns. A word wider than `width` has a line of its own."""
    lines = []
    for word, text in texts.items():
        indent = " " * (width + 4)
        first = f"  {word:<{width}}  " if len(word) <= width else indent
        lines += [f"  {word}"] if len(word) > width else []
        lines += textwrap.wrap(text, _columns(), initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
    return lines
