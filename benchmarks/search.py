"""How fast the search for the best plan is: legal plans a second, in CPU seconds of one process after import.

python -m benchmarks.search                                                    # the 1T GPT on 3,072 A100
python -m benchmarks.search 64 model=llama3_8b cluster=h100_dgx global_batch=512 precision=bf16
"""

from __future__ import annotations

import sys
import time

from parallelrun.base.errors import ConfigError
from parallelrun.config import compose
from parallelrun.config.overrides import read
from parallelrun.planner.search.fastest_plans import search

DEFAULT = ("3072", "model=gpt_1t", "cluster=a100_dgx", "global_batch=3072", "precision=fp16")


def main(words: list[str]) -> None:
    world, *overrides = words or DEFAULT
    parsed, problems = read(list(overrides), False, "here")
    if problems:
        raise ConfigError(*problems)
    found, _ = compose.compose_once(compose.prepare(parsed, (), "plan", False))
    begin = time.process_time()
    result = search(found.config, found.given, int(world))
    seconds = time.process_time() - begin
    counted = "" if result.is_counted else "at most "
    print(f"{result.considered:,} legal plans, {counted}{result.fitting:,} fit: {seconds:.2f} CPU seconds, "
          f"{result.considered / seconds:,.0f} plans a second")  # fmt: skip
    for one in result.best:
        assert one.time is not None
        print(f"{one.time.step_s:10.4g} s  {one.heaviest_bytes / 2**30:6.1f} GiB  {' '.join(one.overrides)}")


if __name__ == "__main__":
    main(sys.argv[1:])
