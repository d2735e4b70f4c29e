"""`generate` continues a text with a trained model, also on several ranks; `eval` scores it on a dataset."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from parallelrun.base.errors import EXIT_OK, ConfigError, Problem
from parallelrun.checkpoint.exchange.paths import check_paths
from parallelrun.cli import argv as command_lines
from parallelrun.cli import help
from parallelrun.cli.argv import CommandLine
from parallelrun.cli.json_output import print_json
from parallelrun.cli.tool_settings import keys_of, read_settings
from parallelrun.config.keys import Key
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.model import definitions
from parallelrun.report.records import find
from parallelrun.training.inference import SPLITS

if TYPE_CHECKING:
    from parallelrun.checkpoint.exchange.source import StoredModel
    from parallelrun.training.inference.generate import Sampling

_GENERATE = """usage: parallelrun generate RUN TEXT [key=value ...] [--json]

Continue TEXT with a trained language model. RUN: the directory of a run, checkpoint, import, export or Hugging Face
model; or, as in `parallelrun runs show`, latest, a run's name, or the random end of its directory.

  max_tokens=100    tokens to generate
  temperature=1.0   0: always the most likely token
  top_k=null        draw among so many most likely tokens
  seed=0            of the draws
  tokens=[1,2,3]    a prompt of token ids in place of TEXT, for a model without a tokenizer
  tp=1              ranks that hold the model together (1D tensor parallel), each with its heads' keys and values"""
_EVAL = """usage: parallelrun eval RUN [key=value ...] [--json]

Mean loss, perplexity, bits per byte (of models of bytes) and top-1 of trained weights. RUN: as in generate.

  split=val         val | train | all
  samples=null      number of samples at most
  dataset=... path=... dataset.*   other data than the run's; precision=..."""

_OF_GENERATE = keys_of(
    Key("max_tokens", "int", False, least=1),
    Key("temperature", "float", False, least=0, below=math.inf),
    Key("top_k", "int", True, least=1),
    Key("seed", "int", False, least=0, below=2**63),
    Key("tokens", "list", False),
    Key("tp", "int", False, least=1),
)
_DEFAULTS = {"max_tokens": 100, "temperature": 1.0, "top_k": None, "seed": 0, "tokens": None, "tp": 1}
_OF_EVAL = keys_of(Key("split", "str", False, choices=tuple(SPLITS)), Key("samples", "int", True, least=1))
_DATA_KEYS = ("dataset", "precision", "path", "tokenizer")


def generate(words: list[str]) -> int:
    """`parallelrun generate RUN TEXT [key=value ...]`."""
    if (code := help.answered(words, _GENERATE)) is not None:
        return code
    as_json, words = "--json" in words, [word for word in words if word != "--json"]
    text = words[1] if len(words) > 1 and not words[1].startswith("tokens=") else None
    settings, problems = read_settings(words[1 if text is None else 2 :], _OF_GENERATE, _DEFAULTS)
    token_ids, count, tp = settings["tokens"], settings["max_tokens"], settings["tp"]
    if (text is None) != any(word.startswith("tokens=") for word in words[1:]):
        cause = "give a text, or token ids as tokens=[1,2,3]"
        problems.append(Problem(cause, "text", command="parallelrun generate --help"))
    path = str(find.directory_of(words[0]))
    check_paths(path, "run", problems=problems)
    from parallelrun.checkpoint.exchange import tokenizer
    from parallelrun.checkpoint.exchange.source import open_source
    from parallelrun.training.inference.generate import Generator, Sampling, check_causal, check_prompt, collected

    source = open_source(path, "run")
    source.weights.verify()
    codec = tokenizer.codec(source) if token_ids is None else None
    prompt = codec.encode([(text or "").encode()])[0].tolist() if codec else token_ids
    check_causal(source)
    check_prompt(prompt, source.spec.vocab)
    sampling = Sampling(settings["temperature"], settings["top_k"], settings["seed"])
    if tp > 1:
        tokens, rate = _on_ranks(source, tp, prompt, count, sampling, codec is not None, as_json)
    else:
        model = Generator(source)
        began = time.perf_counter()
        tokens = collected(model.tokens(prompt, count, sampling), prompt, codec, as_json)
        rate = len(tokens) / (time.perf_counter() - began)
    if as_json:
        continuation = codec.decode(tokens) if codec else None
        print_json({"prompt": text, "prompt_tokens": prompt, "tokens": tokens, "text": continuation,
                    "tokens_per_s": rate})  # fmt: skip
    return EXIT_OK


def _on_ranks(
    source: StoredModel, tp: int, prompt: list[int], count: int, sampling: Sampling, has_text: bool, quiet: bool
) -> tuple[list[int], float]:
    """The tokens that `tp` ranks generate, and how many a second. Raises ConfigError, EnvironmentProblem."""
    from parallelrun.launch.ranks.task import run_task, task_root
    from parallelrun.training.inference.model import plan_for
    from parallelrun.training.inference.worker import GENERATED

    config, plan = plan_for(source, tp)
    request = {"source": str(source.path), "prompt": prompt, "count": count, "sampling": asdict(sampling),
               "has_text": has_text, "quiet": quiet}  # fmt: skip
    with task_root("generate") as root:
        folder = run_task(root, config, plan, "parallelrun.training.inference.worker:generate", request)
        generated = json.loads((folder / GENERATED).read_text(encoding="utf-8"))
    return generated["tokens"], generated["tokens_per_s"]


def evaluate(words: list[str]) -> int:
    """`parallelrun eval RUN [key=value ...]`."""
    if (code := help.answered(words, _EVAL)) is not None:
        return code
    as_json = "--json" in words
    own = [word for word in words[1:] if word.startswith(("split=", "samples="))]
    settings, problems = read_settings(own, _OF_EVAL, {"split": "val", "samples": None})
    line = _data_words([word for word in words[1:] if word not in own and word != "--json"], problems)
    path = str(find.directory_of(words[0]))
    check_paths(path, "run", problems=problems)
    from parallelrun.checkpoint.exchange.source import open_source
    from parallelrun.training.inference.evaluate import evaluate as score

    source = open_source(path, "run")
    source.weights.verify()
    config = _with_overrides(source.config, line)
    scores = score(source, config, settings["split"], settings["samples"])
    fields = {"source": str(source.path), "split": settings["split"], **asdict(scores)}
    if as_json:
        print_json(fields)
        return EXIT_OK
    by_part = {f"loss, {label}": loss for label, loss in fields.pop("parts").items()}
    for name, value in {**fields, **by_part}.items():
        if value is not None:
            print(f"{name:<14} {value:.4f}" if isinstance(value, float) else f"{name:<14} {value}")
    return EXIT_OK


def _data_words(words: list[str], problems: list[Problem]) -> CommandLine:
    """What the command line says of the data and the precision; `problems` gets all that is wrong with it."""
    try:
        line = command_lines.read(words)
    except ConfigError as error:
        problems += error.problems
        return command_lines.read([])
    wrong = [override.key for override in line.overrides if override.key.partition(".")[0] not in _DATA_KEYS]
    if wrong or line.flags:
        cause = f"eval reads dataset, path, precision, split and samples, not {', '.join([*wrong, *line.flags])}"
        problems.append(Problem(cause, "command line", command="parallelrun eval --help"))
    return line


def _with_overrides(saved: Config, line: CommandLine) -> Config:
    """The saved configuration with the data and precision of the command line. Raises ConfigError."""
    from parallelrun.config import compose
    from parallelrun.config.continued import continued

    composed, _ = compose.compose_once(compose.prepare(line.overrides, (), "run", line.trust))
    config = continued(composed.config, composed.given, saved) if line.overrides else saved
    if definitions.dataset(config).vocab_follows_model and "dataset" not in composed.given:
        cause = f"dataset={config.dataset.name} is random and says nothing about trained weights"
        raise ConfigError(Problem(cause, "dataset", "dataset=text path=FILE_OR_FOLDER"))
    return replace(config, model=saved.model, verb=definitions.EVAL, global_batch=1, local_batch=None)
