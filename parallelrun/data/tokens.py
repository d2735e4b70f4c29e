"""Token datasets: windows over streams of tokens, or packed documents; and the split into train and val, which every
dataset shares."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.config.schema.run_schema import DEFAULT_GLOBAL_BATCH, Config
from parallelrun.data.arrays import NDArray, np
from parallelrun.data.order import derive_key, mix
from parallelrun.data.packing import Packs, pack
from parallelrun.planner.model.definitions import EVAL, IGNORED, Dataset, Packing, Split
from parallelrun.planner.model.model_spec import ModelSpec

# With fewer documents than this, a split by documents would be too coarse: their pieces are split instead.
FEW_DOCUMENTS = 20
PIECE_TOKENS = 4096


@dataclass(frozen=True)
class Documents:
    """The documents of a token dataset, read back to back as one stream of tokens, without copying them together.

    sources: 1-D integer arrays (memory maps or arrays in memory); names: of each source, for messages. Document d is
    sources[source_of[d]][starts[d] : starts[d] + lengths[d]], and keys[d] decides whether it belongs to train or val.
    has_hidden: a token id that is stored as ~id is an input, and never a target; such documents are not cut.
    """

    sources: Sequence[NDArray[Any]]
    names: tuple[str, ...]
    source_of: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    keys: NDArray[np.uint64]
    has_hidden: bool = False

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def locate(self, token: int) -> tuple[int, int, int]:
        """(source number, index inside it, index in the stream of the document's end) of a token of the stream."""
        document = int(self._ends.searchsorted(token, side="right"))
        end = int(self._ends[document])
        return int(self.source_of[document]), int(self.starts[document] + self.lengths[document]) - end + token, end

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop) of the stream as int64, crossing documents where the range does."""
        parts = []
        while start < stop:
            source, first, end = self.locate(start)
            count = min(end, stop) - start
            parts.append(self.sources[source][first : first + count])
            start += count
        return np.concatenate(parts, dtype=np.int64)

    def read_below(self, vocab: int, start: int, stop: int, sample: int) -> NDArray[np.int64]:
        """`read`, for a sample, hidden tokens as they are stored. Raises EnvironmentProblem for a token id that is not
        in [0, vocab), which names the sample, the file and the byte offset."""
        tokens = stored = self.read(start, stop)
        if self.has_hidden:
            tokens = unhidden(stored)
        if self._may_exceed(vocab) and (tokens.max() >= vocab or tokens.min() < 0):
            first = int(np.flatnonzero((tokens >= vocab) | (tokens < 0))[0])
            source, offset, _ = self.locate(start + first)
            where = f"sample {sample} (byte {offset * self.sources[source].itemsize} of {self.names[source]})"
            message = f"token id {tokens[first]} of {where} is not below the model's vocab {vocab}"
            fix = f"model.vocab={int(tokens.max()) + 1} or more, or leave it out to use the dataset's"
            raise EnvironmentProblem(Problem(message, "model.vocab", fix))
        return stored

    def _may_exceed(self, vocab: int) -> bool:
        """False when the element type alone keeps every token inside the vocab (bytes, vocab 256)."""
        least, most = self._bounds
        return least < 0 or most >= vocab

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        """The least and the largest number of the sources' element types: there may be thousands of sources."""
        bounds = [np.iinfo(dtype) for dtype in {source.dtype for source in self.sources}]
        return min((int(bound.min) for bound in bounds), default=0), max(
            (int(bound.max) for bound in bounds), default=0
        )

    def choose(self, selected: NDArray[np.bool_]) -> Documents:
        columns = ("source_of", "starts", "lengths", "keys")
        return replace(self, **{name: getattr(self, name)[selected] for name in columns})

    def cut(self, seq: int) -> Documents:
        """The same tokens as more, smaller documents: pieces of PIECE_TOKENS, or a twentieth of a small document, but
        never smaller than a window."""
        rows, keys = [], []
        for source, start, length, key in zip(self.source_of, self.starts, self.lengths, self.keys):
            size = max(seq + 1, min(PIECE_TOKENS, int(length) // 20))
            begins = np.arange(0, length, size, dtype=np.int64)
            rows.append(np.stack([np.full_like(begins, source), start + begins, np.minimum(size, length - begins)]))
            keys.append(mix(np.arange(begins.size, dtype=np.uint64)) ^ key)
        source_of, starts, lengths = np.concatenate(rows, axis=1)
        return Documents(self.sources, self.names, source_of, starts, lengths, np.concatenate(keys))

    def open(self, vocab: int, fingerprint: str, config: Config, spec: ModelSpec, source: str) -> Dataset:
        """The dataset with train and val by the hash of the document, or of its pieces where documents are few.

        See `require_samples`.
        """
        is_cut = 0 < self.keys.size < FEW_DOCUMENTS and not self.has_hidden
        documents = self.cut(spec.seq) if is_cut else self
        is_val = held_out(documents.keys, config.dataset.val_fraction)
        train, val = (documents.choose(part) for part in (~is_val, is_val))
        name, seq = config.dataset.name, spec.seq
        if config.dataset.pack or self.has_hidden:
            split = PackedDocuments if config.dataset.pack else SingleDocuments
            shift, seed = 1 if spec.mask_token is None else 0, config.seed
            if config.dataset.pack:
                fingerprint = hashlib.sha256(f"packed/1/{seed}/{fingerprint}".encode()).hexdigest()
            packs, val_packs, whole_packs = (split(part, seq, spec.vocab, shift, seed) for part in (train, val, self))
            dataset = Dataset(name, vocab, fingerprint, packs, val_packs, has_ignored=True, whole=whole_packs)
        else:
            windows, val_windows, whole = (TokenWindows(part, seq, spec.vocab) for part in (train, val, self))
            dataset = Dataset(name, vocab, fingerprint, windows, val_windows, whole=whole)
        return require_samples(dataset, config, spec, source)


@dataclass(frozen=True)
class TokenWindows(Split):
    """Windows of seq + 1 tokens, one every seq tokens: input = the first seq, target = the next token of each.

    vocab: token ids must be in [0, vocab), else EnvironmentProblem names the sample, the file and the byte offset.
    """

    documents: Documents
    seq: int
    vocab: int

    @cached_property
    def _length(self) -> int:
        return max(0, (self.documents.num_tokens - 1) // self.seq)

    def __len__(self) -> int:
        return self._length

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        self.check(index)
        first = index * self.seq
        tokens = self.documents.read_below(self.vocab, first, first + self.seq + 1, index)
        return tokens[:-1], tokens[1:]

    def rest(self, part: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        first, stop = len(self) * self.seq, self.documents.num_tokens
        if stop - first < 2:
            return None
        tokens = self.documents.read_below(self.vocab, first, stop, len(self))
        return tokens[:-1], tokens[1:]


@dataclass(frozen=True)
class PackedDocuments(Split):
    """Whole documents, one after the other, and padding (token 0, target `IGNORED`) at the end of each sample.

    shift: 1 where the target of each token is the next one of its document, whose last token is then no input; 0 where
    targets are made of the inputs, and every token is one. seed: of `packing.pack`.
    """

    documents: Documents
    seq: int
    vocab: int
    shift: int
    seed: int
    packs = True

    @cached_property
    def _packs(self) -> Packs:
        return pack(self.documents.lengths, self.seq, self.shift, self.seed)

    def __len__(self) -> int:
        return len(self._packs)

    def document_lengths(self, index: int) -> NDArray[np.int64]:
        self.check(index)
        return self._packs.lengths[self._packs.pieces(index)].astype(np.int64)

    def packing(self) -> Packing:
        return self._packs.packing()

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        self.check(index)
        inputs, targets = np.zeros(self.seq, np.int64), np.full(self.seq, IGNORED, np.int64)
        pieces, stop = self._packs.pieces(index), 0
        for start, length in zip(self._packs.starts[pieces].tolist(), self._packs.lengths[pieces].tolist()):
            tokens = self.documents.read_below(self.vocab, start, start + length + self.shift, index)
            begin, stop = stop, stop + length
            inputs[begin:stop] = unhidden(tokens[:length])
            targets[begin:stop] = np.maximum(tokens[self.shift :], IGNORED)
        return inputs, targets


@dataclass(frozen=True)
class SingleDocuments(PackedDocuments):
    """One document a sample, of at most seq + 1 tokens, and padding behind it, of which attention need not know: no
    token attends to later ones."""

    packs = False

    @cached_property
    def _packs(self) -> Packs:
        lengths = self.documents.lengths
        return Packs(np.cumsum(lengths) - lengths, (lengths - 1).astype(np.int32), np.arange(1, lengths.size + 1), 0)


def unhidden(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The token ids of stored ones, see `Documents.has_hidden`."""
    return tokens ^ (tokens >> 63)


def held_out(keys: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Which documents belong to `val`: those whose hash is below `fraction`, whatever else the dataset holds.

    With two documents or more neither split is left empty: the one with the smallest (largest) hash is moved. Raises
    ConfigError unless 0 < fraction < 1.
    """
    if not 0 < fraction < 1:
        message = f"dataset.val_fraction={fraction:g} must lie between 0 and 1: every run is evaluated at its end"
        raise ConfigError(Problem(message, "dataset.val_fraction", "0.05"))
    hashes = mix(keys + np.uint64(derive_key(0x76616C)))
    is_val = hashes < np.uint64(int(fraction * (2**64 - 1)))
    if hashes.size > 1:
        if not is_val.any():
            is_val[np.argmin(hashes)] = True
        elif is_val.all():
            is_val[np.argmax(hashes)] = False
    return is_val


def require_samples(dataset: Dataset, config: Config, spec: ModelSpec, source: str) -> Dataset:
    """The dataset, if `train` fills a global batch and `val` holds a sample; else EnvironmentProblem with the counts.

    source: what was read, with its resolved path and size, for the message. A val split smaller than a global batch is
    fine: evaluation then reads samples more than once. The verb `eval` takes what there is.
    """
    if config.verb == EVAL:
        return dataset
    unit = f"samples of {spec.seq} tokens" if spec.kind == "tokens" else "samples"
    local = None if config.local_batch is None else config.local_batch * (config.dp or 1)
    batch, count = config.global_batch or local or DEFAULT_GLOBAL_BATCH, len(dataset.train)
    if count < batch:
        message = f"{source} gives {count} training {unit}, fewer than global_batch={batch}"
        fix = f"more data, a smaller model.seq, or global_batch of at most {max(1, count)}"
        raise EnvironmentProblem(Problem(message, "dataset", fix))
    if len(dataset.val) == 0:
        message = f"{source} gives no validation {unit} (dataset.val_fraction={config.dataset.val_fraction:g})"
        fix = "a larger dataset.val_fraction, more data, or a smaller model.seq"
        raise EnvironmentProblem(Problem(message, "dataset.val_fraction", fix))
    return dataset
