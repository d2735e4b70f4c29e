"""Scores a trained model on a whole split of a dataset."""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.checkpoint.exchange import tokenizer
from parallelrun.checkpoint.exchange.source import StoredModel
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import open_dataset
from parallelrun.data.tokenizing.token_bytes import token_bytes
from parallelrun.data.tokenizing.tokenizer import NUM_BYTES
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.functions import token_loss
from parallelrun.planner.model import definitions
from parallelrun.planner.model.definitions import BYTES, IGNORED, Dataset, Split
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.training.inference import SPLITS
from parallelrun.training.inference.model import loaded

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
    num_ids = definitions.dataset(config).vocab_size(config)
    extra = 1 if source.spec.mask_token is not None and source.config.model.mask_token is None else 0  # [MASK]
    if num_ids is not None and num_ids + extra > source.spec.vocab:
        message = f"dataset {config.dataset.name} has {num_ids} token ids or classes, and the model {source.spec.vocab}"
        raise ConfigError(Problem(message, "dataset"))
    spec = source.spec
    dataset = open_dataset(config, spec)
    network = loaded(source, config, spec)
    device = next(network.parameters()).device
    lengths = _token_bytes(config, dataset, spec)
    sums: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))  # by part of a mixture
    samples = num_bytes = 0
    packs = definitions.model(source.config).packs
    for label, rows, documents in _batches(dataset, split, limit, spec, packs):
        inputs, targets = (np.stack(each) for each in zip(*((row.input, row.target) for row in rows)))
        with torch.inference_mode():
            wanted = torch.from_numpy(targets).to(device)
            packed = None if documents is None else documents.map(lambda positions: positions.to(device))
            logits = network(torch.from_numpy(inputs).to(device), documents=packed)
            valid = wanted >= 0
            right = ((logits.argmax(-1) == wanted) & valid).sum()
            sums[label] += torch.stack([token_loss(logits, wanted).cpu(), right.cpu(), valid.sum().cpu()]).double()
        samples += sum(bool(row.lengths) for row in rows)
        num_bytes += 0 if lengths is None else int(lengths[targets[targets >= 0]].sum())
    totals = sum(sums.values(), torch.zeros(3, dtype=torch.float64))
    if totals[2] == 0:
        raise ConfigError(
            Problem(f"the split {split} of dataset {config.dataset.name} has no target", "split", "split=all")
        )
    loss = float(totals[0] / totals[2])
    is_text = not spec.classifies
    return Scores(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)) if is_text else None,
        bits_per_byte=float(totals[0]) / math.log(2) / num_bytes if num_bytes else None,
        top1=float(totals[1] / totals[2]),
        targets=int(totals[2]),
        samples=samples,
        dataset=config.dataset.name,
        fingerprint=dataset.fingerprint,
        parts={label: float(part[0] / part[2]) for label, part in sums.items() if label and part[2]},
    )


def _token_bytes(config: Config, dataset: Dataset, spec: ModelSpec) -> np.ndarray | None:
    """Bytes of text by token id; None where they are not known or targets are not all of the text."""
    if spec.kind != "tokens" or spec.mask_token is not None or spec.text is not None:
        return None
    if dataset.tokenizer == BYTES:
        return (np.arange(spec.vocab) < NUM_BYTES).astype(np.int64)  # the end of a document is no byte
    made = definitions.dataset(config).tokenizer(config)
    lengths = token_bytes(made.path) if made and made.path else None
    return None if lengths is None else np.pad(lengths, (0, max(0, spec.vocab - len(lengths))))


def _batches(
    dataset: Dataset, split: str, limit: int | None, spec: ModelSpec, packs: bool
) -> Iterator[tuple[str, list[_Row], DocumentBounds | None]]:
    """(part of a mixture or "", samples in order, their documents if not each is one) of a split, in batches of whole
    routing groups: padding fills the last. packs: the model knows of documents."""
    splits = [getattr(dataset, name) for name in SPLITS[split]]
    splits = [dataset.whole] if split == "all" and dataset.whole is not None else splits
    group = spec.router.group_samples if spec.router is not None else 1
    size = max(1, _ELEMENTS // (spec.targets_per_sample * spec.vocab) // group) * group
    left = limit if limit is not None else sys.maxsize
    for part in splits:
        first = 0
        shares = [(share.label, share.num_samples) for share in part.shares] or [("", len(part))]
        for number, (label, length) in enumerate(shares):
            rows = itertools.islice(_rows(part, number, range(first, first + length), spec), left)
            while batch := list(itertools.islice(rows, size)):
                left -= len(batch)
                empty = _Row(np.zeros_like(batch[0].input), np.full_like(batch[0].target, IGNORED), [])
                batch += [empty] * (-len(batch) % group)
                is_whole = not part.packs and all(row.lengths == [spec.seq] for row in batch)
                bounds = DocumentBounds.of([row.lengths for row in batch], spec.seq) if packs and not is_whole else None
                yield label, batch, bounds
            first += length


@dataclass(frozen=True)
class _Row:
    """A sample. lengths: of its documents; empty: it is padding."""

    input: np.ndarray
    target: np.ndarray
    lengths: list[int]


def _rows(part: Split, number: int, indices: range, spec: ModelSpec) -> Iterator[_Row]:
    """The samples of part `number` of a mixture, and the tokens behind the last one, with padding behind them."""
    for index in indices:
        yield _Row(*part.sample(index), part.document_lengths(index).tolist() if part.packs else [spec.seq])
    rest = part.rest(number)
    if rest is not None:
        used = len(rest[0])
        inputs, targets = (
            np.pad(values, (0, spec.seq - used), constant_values=fill) for values, fill in zip(rest, (0, IGNORED))
        )
        yield _Row(inputs, targets, [used])
