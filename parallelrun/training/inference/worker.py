"""The ranks' side of `parallelrun generate ... tp=2`: all ranks compute; rank 0 prints and writes the tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from parallelrun.base.context import ASKED, WorkerContext
from parallelrun.base.errors import EXIT_OK
from parallelrun.base.records import write_json
from parallelrun.checkpoint.exchange import tokenizer
from parallelrun.checkpoint.exchange.source import open_source
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed.mesh import build_mesh
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.inference.generate import Generator, Sampling, collected

GENERATED = "generated.json"


def generate(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Generate what `asked.json` asks for; rank 0 writes `generated.json`."""
    job: dict[str, Any] = json.loads((context.directory / ASKED).read_text(encoding="utf-8"))
    source = open_source(job["source"], "run")
    codec = tokenizer.codec(source) if job["has_text"] else None
    model = Generator(source, (plan, build_mesh(plan, context.device)))

    def tokens() -> Iterator[int]:
        for number, token in enumerate(model.tokens(job["prompt"], job["count"], Sampling(**job["sampling"]))):
            context.heartbeat(number + 1, "generate")
            yield token

    began = time.perf_counter()
    generated = collected(tokens(), job["prompt"], codec, job["quiet"] or not context.console_owner)
    if context.console_owner:
        rate = len(generated) / (time.perf_counter() - began)
        write_json(context.directory / GENERATED, {"tokens": generated, "tokens_per_s": rate})
    return EXIT_OK
