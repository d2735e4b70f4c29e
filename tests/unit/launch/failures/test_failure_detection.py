"""Which rank is suspected of a hang, from the stacks of all ranks."""

from __future__ import annotations

import pytest

from parallelrun.launch.failures.failure_detection import RankState, rank_state, suspects
from parallelrun.launch.host import os_process

WAITING = f'''Thread 0x1 (most recent call first):
  File "/usr/lib/threading.py", line 1 in wait

Current thread 0x2 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{__file__}", line 1 in train
'''
ELSEWHERE = f'''Current thread 0x2 (most recent call first):
  File "/data/reader.py", line 7 in read_next
  File "{__file__}", line 1 in train
'''


def test_a_rank_inside_a_collective_waits():
    assert rank_state(3, WAITING).waiting
    assert not rank_state(3, ELSEWHERE).waiting
    assert rank_state(3, ELSEWHERE).frames[0] == "read_next (/data/reader.py:7)"


@pytest.mark.parametrize(
    ("at", "guilty", "why"),
    [
        ({0: (3, WAITING), 1: (3, ELSEWHERE), 2: (3, WAITING)}, [1], "not in a collective but in read_next"),
        ({0: (3, WAITING), 1: (3, WAITING), 2: (4, WAITING)}, [2], "at step 4, all others at step 3"),
        ({0: (3, WAITING), 1: (3, ""), 2: (3, WAITING)}, [1], "gave no stack"),
        ({0: (3, WAITING), 1: (3, WAITING)}, [], ""),
        ({0: (3, ELSEWHERE), 1: (3, ELSEWHERE)}, [], ""),
        ({0: (2, WAITING), 1: (3, WAITING)}, [], ""),  # one against one: no majority
    ],
)
def test_the_one_that_is_not_where_the_others_are_is_the_suspect(at, guilty, why):
    found = suspects({rank: rank_state(step, dump) for rank, (step, dump) in at.items()})
    assert found[0] == guilty and why in found[1]


def test_a_stopped_rank_is_suspected_before_all():
    assert suspects({0: RankState(1, True), 1: RankState(1, False, ("f",), False)})[0] == [0]
    assert not os_process.is_stopped(1)
