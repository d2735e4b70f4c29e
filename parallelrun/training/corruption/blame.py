"""Names the rank whose bits are wrong, from what every rank has seen.

In the order of certainty: a rank's weights changed while nobody wrote to them; a rank gave other bits to a collective
than before, although no rank before it had; one replica differs from most others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallelrun.distributed.sequences import Lane

_SHOWN = 3  # names in a message


@dataclass(frozen=True)
class Difference:
    """How a pass on one rank differs from an earlier one over the same samples and weights.

    lanes: of all its contributions to other ranks; sent: the numbers of those that differ; results: the gradients and
    the loss that differ.
    """

    lanes: Sequence[Lane] = ()
    sent: Sequence[int] = ()
    results: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.sent or self.results)


@dataclass(frozen=True)
class Evidence(Difference):
    """Observations of one rank since the last check, with the difference of a pass if there is one.

    at_rest: (step, tensor) of weights that changed between two updates. replicas: of tensors that differ between
    replicas, (its replicas, digest) by name.
    """

    host: str = ""
    at_rest: Sequence[tuple[int, str]] = ()
    replicas: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Evidence:
        """Return the evidence whose fields another rank has sent as JSON."""
        lanes = [Lane(axis, tuple(ranks), messages) for axis, ranks, messages in document["lanes"]]
        return cls(**{**document, "lanes": lanes})


@dataclass(frozen=True)
class Verdict:
    """ranks: those whose bits are wrong; empty if the evidence does not say which of `among`. what: what was seen."""

    ranks: tuple[int, ...]
    what: str
    among: tuple[int, ...] = ()


def verdict(evidence: Sequence[Evidence]) -> Verdict:
    """Return the ranks that are wrong. evidence: by rank; at least one rank has some."""
    changed = {rank: own.at_rest for rank, own in enumerate(evidence) if own.at_rest}
    if changed:
        step, _ = min(seen for own in changed.values() for seen in own)
        names = _list(name for own in changed.values() for _, name in own)
        return Verdict(tuple(changed), f"memory: {names} changed before the update of step {step}")
    if any(evidence):
        ranks = origins(evidence)
        names = _list(name for rank in ranks for name in evidence[rank].results) or "what it gives to other ranks"
        return Verdict(ranks, f"computation: the same samples and weights gave other bits ({names})")
    return _minority(evidence)


def origins(evidence: Sequence[Evidence]) -> tuple[int, ...]:
    """Return the ranks whose bits first differ in what they computed, not in what they had received.

    The n-th contribution to a lane belongs together on all its members. A rank that differs is a victim if, before it
    first did, another member of a lane gave it something that differs.
    """
    calls = [_numbered(seen.lanes) for seen in evidence]
    differs = {(*calls[rank][i], rank) for rank, seen in enumerate(evidence) for i in seen.sent if i < len(calls[rank])}
    guilty = []
    for rank, seen in enumerate(evidence):
        received = calls[rank][: min(seen.sent, default=None)]
        others = ((lane, number, other) for lane, number in received for other in lane.ranks if other != rank)
        if seen and differs.isdisjoint(others):
            guilty.append(rank)
    return tuple(guilty)


def _numbered(lanes: Sequence[Lane]) -> list[tuple[Lane, int]]:
    """Return each lane with the number of its occurrence."""
    counts: Counter[Lane] = Counter()
    numbered = []
    for lane in lanes:
        numbered.append((lane, counts[lane]))
        counts[lane] += 1
    return numbered


def _minority(evidence: Sequence[Evidence]) -> Verdict:
    """Return the replicas that differ from most others of the same tensors."""
    groups: dict[tuple[str, str], dict[int, int]] = {}
    for rank, seen in enumerate(evidence):
        for name, (replicas, digest) in seen.replicas.items():
            groups.setdefault((name, replicas), {})[rank] = digest
    odd: set[int] = set()
    unknown: set[int] = set()
    names = []
    for (name, _), by_rank in sorted(groups.items()):
        (common, count), *_ = Counter(by_rank.values()).most_common()
        names.append(name)
        if count > len(by_rank) - count:
            odd |= {rank for rank, digest in by_rank.items() if digest != common}
        else:
            unknown |= set(by_rank)
    return Verdict(tuple(sorted(odd)), f"replicas differ in {_list(names)}", tuple(sorted(unknown - odd)))


def _list(names: Any) -> str:
    """Return the first few of some names."""
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - _SHOWN} more" if len(distinct) > _SHOWN else ""
    return ", ".join(distinct[:_SHOWN]) + more
