"""Scores a trained model on a whole split of a dataset."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from parallelrun import definitions
from parallelrun.config.schema import Config
from parallelrun.data import open_dataset
from parallelrun.definitions import Dataset, Split
from parallelrun.errors import ConfigError, Problem
from parallelrun.exchange.source import StoredModel
from parallelrun.inference.model import loaded
from parallelrun.model_spec import ModelSpec
from parallelrun.models.functions import token_loss

SPLITS = {"val": ("val",), "train": ("train",), "all": ("train", "val")}
_ELEMENTS = 2**23  # logits of a batch at most, except for a single sample or routing group


@dataclass(frozen=True)
class Scores:
    """loss: mean cross-entropy per target in nats; perplexity: its exponential, of language models; bits_per_byte: of
    those whose tokens are bytes; top1: the share of targets that are the most likely answer."""

    loss: float
    perplexity: float | None
    bits_per_byte: float | None
    top1: float
    targets: int
    samples: int
    dataset: str
    fingerprint: str


def evaluate(source: StoredModel, config: Config, split: str, limit: int | None) -> Scores:
    """The scores of the weights of `source` on a split, a key of `SPLITS`, of the dataset of `config`.

    limit: number of samples at most. Raises ConfigError, EnvironmentProblem for data that do not suit the model.
    """
    known = definitions.dataset(config).vocab_size(config)
    extra = 1 if source.spec.mask_token is not None else 0  # the id of [MASK]
    if known is not None and known + extra > source.spec.vocab:
        what = f"dataset {config.dataset.name} has {known} token ids or classes, and the model {source.spec.vocab}"
        raise ConfigError(Problem(what, "dataset"))
    spec = source.spec
    dataset = open_dataset(config, spec)
    network = loaded(source, config, spec)
    device = next(network.parameters()).device
    totals, samples = torch.zeros(3, dtype=torch.float64), 0
    for inputs, targets in _batches(dataset, split, limit, spec):
        with torch.inference_mode():
            wanted = torch.from_numpy(targets).to(device)
            logits = network(torch.from_numpy(inputs).to(device))
            valid = wanted >= 0
            right = ((logits.argmax(-1) == wanted) & valid).sum()
            totals += torch.stack([token_loss(logits, wanted).cpu(), right.cpu(), valid.sum().cpu()]).double()
        samples += len(inputs)
    if samples == 0:
        raise ConfigError(Problem(f"the split {split} of dataset {config.dataset.name} has no sample", "split"))
    loss = float(totals[0] / totals[2])
    is_text = spec.kind == "tokens"
    in_bytes = is_text and spec.mask_token is None and definitions.dataset(config).reads_bytes
    return Scores(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)) if is_text else None,
        bits_per_byte=loss / math.log(2) if in_bytes else None,
        top1=float(totals[1] / totals[2]),
        targets=int(totals[2]),
        samples=samples,
        dataset=config.dataset.name,
        fingerprint=dataset.fingerprint,
    )


def _batches(
    dataset: Dataset, split: str, limit: int | None, spec: ModelSpec
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(inputs, targets) of the split's samples in order, in batches of whole routing groups."""
    parts: list[Split] = [getattr(dataset, name) for name in SPLITS[split]]
    group = spec.router.group_samples if spec.router is not None else 1
    size = max(1, _ELEMENTS // (spec.targets_per_sample * spec.vocab) // group) * group
    left = limit if limit is not None else sum(map(len, parts))
    for part in parts:
        count = min(left, len(part)) // group * group
        left -= count
        for start in range(0, count, size):
            pairs = [part.sample(index) for index in range(start, min(start + size, count))]
            yield np.stack([one for one, _ in pairs]), np.stack([target for _, target in pairs])
