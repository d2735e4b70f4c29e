"""The help texts. The examples are planned by a test, so that none of them is ever wrong."""

from __future__ import annotations

from parallelrun.cli.words import TOOLS, VERBS
from parallelrun.config import presets
from parallelrun.config.keys import GROUPS

EXAMPLES = (
    ("parallelrun model=gpt strategy=ptdp tp=2 pp=2", "train a small GPT on 4 ranks of this machine"),
    ("parallelrun plan model=gpt3_175b strategy=ptdp tp=8 pp=64 dp=6", "what 3072 GPUs would do, before they do it"),
    ("parallelrun verify model=gpt strategy=ptdp dp=2 tp=2 pp=2", "prove it equal to one device"),
    ("parallelrun bench model=moe_gpt strategy=gshard dp=2 ep=2", "time experts, spread over the data replicas"),
    ("parallelrun -m model=gpt strategy=ddp,tp,gpipe,ptdp world=4 steps=20", "strategies side by side"),
    ("parallelrun plan recipe=gpt3_oneflow_3072", "a complete run from a shared recipe"),
)

SHORT = """parallelrun: one command composes a model, a dataset and a parallelism plan, and trains.

  parallelrun model=gpt strategy=ptdp tp=2 pp=2     train a small GPT on 4 ranks of this machine
  parallelrun recipe=quickstart                     the shortest complete run
  parallelrun plan model=gpt3_175b tp=8 pp=64 dp=6  what would happen, before it does
  parallelrun ls                                    what there is
  parallelrun --help                                everything else"""

_FLAGS = """  -m, --multirun        a sweep: every combination of comma-separated values, one table at the end
  --json                one JSON document on stdout and nothing else (all verbs; ls, show, doctor)
  -v, --verbose         tracebacks
  --trust               let a recipe name code
  -np N, -H h1:4,h2:4   as horovodrun's: N ranks in the slots of these hosts, in order; other hosts by ssh
  --ssh-port P, --ssh-identity-file F, --ssh-config F
                        how ssh reaches the other hosts, where its own configuration does not say
  --cfg job, --info, -p, --config-dir, -sc install=bash, ...
                        Hydra's flags; --hydra-help explains them
  --version, -h, --help"""

_KEYS = """  degrees     world dp tp pp ep
  batch       global_batch local_batch micro_batch microbatches
  schedule    schedule virtual_stages layout strategy.data.* strategy.tensor.* strategy.pipeline.*
  model       model.layers hidden heads kv_heads ffn vocab seq ...
  experts     model.experts expert_ffn expert_period shared_experts, model.router.* strategy.expert.*
  optimizer   optimizer.lr schedule warmup weight_decay clip ...
  run         steps seed dropout recompute compile device name path runs
  going on    resume=latest (the newest run) | auto (this training, or fresh) | DIR
  records     eval.every eval.batches checkpoint.every keep last, tracker profile=[STEPS]
  plan        ranks=all plot=NAME (what combining gradients costs, as NAME.svg and NAME.csv)
  explain     plot=NAME (every message, as NAME-data.svg, NAME-tensor.svg, ...)"""

_EXIT_CODES = """Exit codes: 0 ok, 1 run failed, 2 usage or configuration, 3 environment or capacity, 4 mismatch or bad
checkpoint, 5 numerics, 6 a rank died, 7 hang, 75 preempted and saved, 130 Ctrl-C, 143 SIGTERM."""


def full() -> str:
    """The text of `parallelrun --help`."""
    width = max(len(word) for word in (*VERBS, *TOOLS))
    lines = ["parallelrun [verb] key=value ...", "", "Verbs (all take the same overrides):"]
    lines += [f"  {word:<{width}}  {text}" for word, text in VERBS.items()]
    lines += ["", "Tools:"] + [f"  {word:<{width}}  {text}" for word, text in TOOLS.items()]
    lines += ["", "Groups (group=option; parallelrun ls tells more):"]
    lines += [f"  {group:<9}  {_wrapped(presets.options(group))}" for group in GROUPS]
    lines += ["", "Keys (key=value):", _KEYS, "", "Flags:", _FLAGS, "", "Examples:"]
    lines += [f"  {command}\n      {text}" for command, text in EXAMPLES]
    lines += ["", _EXIT_CODES]
    return "\n".join(lines)


def _wrapped(words: list[str], width: int = 105) -> str:
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += word + " "
    return ("\n" + " " * 13).join(line.rstrip() for line in lines)
