"""Scores a trained model on a whole split of a dataset."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from parallelrun import definitions
from parallelrun.config.schema import Config
from parallelrun.data import open_dataset
from parallelrun.data.token_bytes import token_bytes
from parallelrun.data.tokenizer import NUM_BYTES
from parallelrun.definitions import BYTES, Dataset, Split
from parallelrun.errors import ConfigError, Problem
from parallelrun.exchange import tokenizer
from parallelrun.exchange.source import StoredModel
from parallelrun.inference import SPLITS
from parallelrun.inference.model import loaded
from parallelrun.model_spec import ModelSpec
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.functions import token_loss

_ELEMENTS = 2**23  # logits of a batch at most, except for a single sample or routing group


@dataclass(frozen=True)
class Scores:
    """loss: mean cross-entropy per target in nats; perplexity: its exponential, of language models; bits_per_byte: of
    those whose tokens are known to be bytes or parts of text; top1: the share of targets that are the most likely
    answer; parts: the loss on each part of a mixture."""

    loss: float
    perplexity: float | None
    bits_per_byte: float | None
    top1: float
    targets: int
    samples: int
    dataset: str
    fingerprint: str
    parts: dict[str, float]


def evaluate(source: StoredModel, config: Config, split: str, limit: int | None) -> Scores:
    """The scores of the weights of `source` on a split, a key of `SPLITS`, of the dataset of `config`.

    limit: number of samples at most. Raises ConfigError, EnvironmentProblem for data that do not suit the model.
    """
    config = tokenizer.with_own_tokenizer(source, config)
    known = definitions.dataset(config).vocab_size(config)
    extra = 1 if source.spec.mask_token is not None and source.config.model.mask_token is None else 0  # [MASK]
    if known is not None and known + extra > source.spec.vocab:
        what = f"dataset {config.dataset.name} has {known} token ids or classes, and the model {source.spec.vocab}"
        raise ConfigError(Problem(what, "dataset"))
    spec = source.spec
    dataset = open_dataset(config, spec)
    network = loaded(source, config, spec)
    device = next(network.parameters()).device
    lengths = _token_bytes(config, dataset, spec)
    sums: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))  # by part of a mixture
    samples = num_bytes = 0
    for label, inputs, targets, documents in _batches(dataset, split, limit, spec):
        with torch.inference_mode():
            wanted = torch.from_numpy(targets).to(device)
            packed = None if documents is None else documents.map(lambda positions: positions.to(device))
            logits = network(torch.from_numpy(inputs).to(device), documents=packed)
            valid = wanted >= 0
            right = ((logits.argmax(-1) == wanted) & valid).sum()
            sums[label] += torch.stack([token_loss(logits, wanted).cpu(), right.cpu(), valid.sum().cpu()]).double()
        samples += len(inputs)
        num_bytes += 0 if lengths is None else int(lengths[targets[targets >= 0]].sum())
    if samples == 0:
        raise ConfigError(Problem(f"the split {split} of dataset {config.dataset.name} has no sample", "split"))
    totals = torch.stack([*sums.values()]).sum(0)
    loss = float(totals[0] / totals[2])
    is_text = spec.kind == "tokens"
    return Scores(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)) if is_text else None,
        bits_per_byte=float(totals[0]) / math.log(2) / num_bytes if num_bytes else None,
        top1=float(totals[1] / totals[2]),
        targets=int(totals[2]),
        samples=samples,
        dataset=config.dataset.name,
        fingerprint=dataset.fingerprint,
        parts={label: float(one[0] / one[2]) for label, one in sums.items() if label and one[2]},
    )


def _token_bytes(config: Config, dataset: Dataset, spec: ModelSpec) -> np.ndarray | None:
    """Bytes of text by token id; None where they are not known or targets are not all of the text."""
    if spec.kind != "tokens" or spec.mask_token is not None:
        return None
    if dataset.tokenizer == BYTES:
        return (np.arange(spec.vocab) < NUM_BYTES).astype(np.int64)  # the end of a document is no byte
    made = definitions.dataset(config).tokenizer(config)
    found = token_bytes(made.path) if made and made.path else None
    return None if found is None else np.pad(found, (0, max(0, spec.vocab - len(found))))


def _batches(
    dataset: Dataset, split: str, limit: int | None, spec: ModelSpec
) -> Iterator[tuple[str, np.ndarray, np.ndarray, DocumentBounds | None]]:
    """(part of a mixture or "", inputs, targets, packed documents) of the split's samples in order, in batches of whole
    routing groups."""
    parts: list[Split] = [getattr(dataset, name) for name in SPLITS[split]]
    group = spec.router.group_samples if spec.router is not None else 1
    size = max(1, _ELEMENTS // (spec.targets_per_sample * spec.vocab) // group) * group
    left = limit if limit is not None else sum(map(len, parts))
    for part, label, first, length in _sources(parts):
        count = min(left, length) // group * group
        left -= count
        for start in range(first, first + count, size):
            chosen = range(start, min(start + size, first + count))
            pairs = [part.sample(index) for index in chosen]
            lengths = [part.document_lengths(index).tolist() for index in chosen] if part.packs else None
            packed = None if lengths is None else DocumentBounds.of(lengths, spec.seq)
            yield label, np.stack([one for one, _ in pairs]), np.stack([target for _, target in pairs]), packed


def _sources(splits: list[Split]) -> Iterator[tuple[Split, str, int, int]]:
    """(split, label, first sample, number of samples) of each part of a mixture, or of the whole split."""
    for split in splits:
        first = 0
        for label, length in [(one.label, one.num_samples) for one in split.shares] or [("", len(split))]:
            yield split, label, first, length
            first += length
