"""What every dataset is: a vocabulary, a fingerprint and two splits; and the windows over token streams most share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from parallelrun.config.schema import Config
from parallelrun.data.arrays import np
from parallelrun.data.order import derive_key, mix
from parallelrun.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.model_spec import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFAULT_GLOBAL_BATCH = 48
# Below this many documents a split by whole ones would be too coarse, so their pieces are split instead.
FEW_DOCUMENTS = 20
PIECE_TOKENS = 4096


class Split(Protocol):
    """Samples by index. `sample` is a pure function of the index and may be called from any rank."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(input, target): token ids int64 of shape (seq,) each, or float32 features or an image (channels, height,
        width) and one int64 class; a target below 0 is ignored by the loss. A split that augments has
        `augmented(index, sample_id)` too, which training reads instead."""


@dataclass(frozen=True)
class Dataset:
    """vocab: number of token ids or classes the data can hold; fingerprint: sha256 of what the samples are made of.

    has_ignored: some targets are below 0, so that the valid ones must be counted before every step.
    """

    name: str
    vocab: int
    fingerprint: str
    train: Split
    val: Split
    has_ignored: bool = False


def collate(split: Split, indices: Sequence[int] | NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """(inputs, targets) of several samples, stacked along a new first dim; at least one index."""
    pairs = [split.sample(int(index)) for index in indices]
    return np.stack([pair[0] for pair in pairs]), np.stack([pair[1] for pair in pairs])


def requested_batch(config: Config) -> int:
    """The global batch that the config asks for, in samples (48 when it does not say)."""
    if config.global_batch is not None:
        return config.global_batch
    if config.local_batch is not None:
        return config.local_batch * (config.dp or 1)
    return DEFAULT_GLOBAL_BATCH


class TokenStream:
    """Documents read back to back as one stream of tokens, without copying them together.

    sources: 1-D integer arrays (memory maps or arrays in memory). Document d is
    sources[source_of[d]][starts[d] : starts[d] + lengths[d]].
    """

    def __init__(
        self,
        sources: Sequence[NDArray[Any]],
        source_of: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ):
        filled = lengths > 0
        self.sources = sources
        self._source_of, self._starts = source_of[filled], starts[filled]
        self._ends = np.cumsum(lengths[filled])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def locate(self, position: int) -> tuple[int, int]:
        """(source number, offset in tokens inside it) of a position of the stream."""
        document = int(np.searchsorted(self._ends, position, side="right"))
        begin = int(self._ends[document - 1]) if document else 0
        return int(self._source_of[document]), int(self._starts[document]) + position - begin

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop) of the stream as int64, crossing documents where the range does."""
        document = int(self._ends.searchsorted(start, side="right"))
        if stop <= self._ends[document]:  # the common case: inside one document
            begin = int(self._ends[document - 1]) if document else 0
            first = int(self._starts[document]) + start - begin
            return self.sources[self._source_of[document]][first : first + stop - start].astype(np.int64)
        out = np.empty(stop - start, dtype=np.int64)
        done = 0
        while done < out.size:
            begin = int(self._ends[document - 1]) if document else 0
            take = min(int(self._ends[document]), stop) - (start + done)
            first = int(self._starts[document]) + start + done - begin
            out[done : done + take] = self.sources[self._source_of[document]][first : first + take]
            done += take
            document += 1
        return out


@dataclass(frozen=True)
class TokenWindows:
    """Windows of seq + 1 tokens, one every seq tokens: input = the first seq, target = the next token of each.

    vocab: token ids must lie in [0, vocab), else EnvironmentProblem names the sample, the file and the byte offset.
    files: what each source is called in such a message.
    """

    stream: TokenStream
    seq: int
    vocab: int
    files: tuple[str, ...]

    @cached_property
    def _may_exceed(self) -> bool:
        """False when the element type alone keeps every token inside the vocab (bytes, vocab 256)."""
        bounds = [np.iinfo(source.dtype) for source in self.stream.sources]
        return any(bound.min < 0 or bound.max >= self.vocab for bound in bounds)

    @cached_property
    def _length(self) -> int:
        return max(0, (len(self.stream) - 1) // self.seq)

    def __len__(self) -> int:
        return self._length

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside a split of {len(self)} samples")
        tokens = self.stream.read(index * self.seq, (index + 1) * self.seq + 1)
        if self._may_exceed and (tokens.max() >= self.vocab or tokens.min() < 0):
            self._refuse(index, tokens)
        return tokens[:-1], tokens[1:]

    def _refuse(self, index: int, tokens: NDArray[np.int64]) -> None:
        place = int(np.flatnonzero((tokens >= self.vocab) | (tokens < 0))[0])
        source, offset = self.stream.locate(index * self.seq + place)
        byte = offset * self.stream.sources[source].itemsize
        raise EnvironmentProblem(
            Problem(
                f"token id {tokens[place]} of sample {index} (byte {byte} of {self.files[source]}) is not below the "
                f"model's vocab {self.vocab}",
                where="model.vocab",
                suggestion=f"model.vocab={int(tokens.max()) + 1} or more, or leave it out to use the dataset's",
            )
        )


def held_out(keys: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Which documents belong to `val`: those whose hash falls below `fraction`, whatever else the dataset holds.

    With two documents or more neither split is left empty: the one with the smallest (largest) hash is moved. Raises
    ConfigError unless 0 < fraction < 1.
    """
    if not 0 < fraction < 1:
        problem = f"dataset.val_fraction={fraction:g} must lie between 0 and 1: every run is evaluated at its end"
        raise ConfigError(Problem(problem, where="dataset.val_fraction", suggestion="0.05"))
    hashes = mix(keys + np.uint64(derive_key(0x76616C)))
    chosen = hashes < np.uint64(int(fraction * (2**64 - 1)))
    if hashes.size > 1:
        if not chosen.any():
            chosen[np.argmin(hashes)] = True
        elif chosen.all():
            chosen[np.argmax(hashes)] = False
    return chosen


@dataclass(frozen=True)
class Documents:
    """What a token dataset is made of, before it is split.

    Document d is sources[source_of[d]][starts[d] : starts[d] + lengths[d]], and keys[d] decides its split. names: what
    each source is called in messages.
    """

    sources: Sequence[NDArray[Any]]
    names: tuple[str, ...]
    source_of: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    keys: NDArray[np.uint64]

    def windows(self, chosen: NDArray[np.bool_], spec: ModelSpec) -> TokenWindows:
        """Samples over the chosen documents, crossing from one to the next."""
        stream = TokenStream(self.sources, self.source_of[chosen], self.starts[chosen], self.lengths[chosen])
        return TokenWindows(stream, spec.seq, spec.vocab, self.names)

    def cut(self, seq: int) -> Documents:
        """The same tokens as more, smaller documents: pieces of a fixed size, of small documents a twentieth, never
        below a window."""
        rows, keys = [], []
        for source, start, length, key in zip(self.source_of, self.starts, self.lengths, self.keys):
            size = max(seq + 1, min(PIECE_TOKENS, int(length) // 20))
            begins = np.arange(0, length, size, dtype=np.int64)
            rows.append(np.stack([np.full_like(begins, source), start + begins, np.minimum(size, length - begins)]))
            keys.append(mix(np.arange(begins.size, dtype=np.uint64)) ^ key)
        source_of, starts, lengths = np.concatenate(rows, axis=1)
        return Documents(self.sources, self.names, source_of, starts, lengths, np.concatenate(keys))


def split_documents(
    name: str, documents: Documents, vocab: int, fingerprint: str, config: Config, spec: ModelSpec, source: str
) -> Dataset:
    """The dataset with train and val by the hash of the document, or of its pieces where documents are few.

    Raises ConfigError for a model that reads no tokens, EnvironmentProblem as `require_samples`.
    """
    if spec.kind != "tokens":
        what = f"dataset={name} gives tokens, and model={config.model.name} reads {spec.kind}"
        raise ConfigError(Problem(what, where="dataset", suggestion="dataset=synthetic"))
    if 0 < documents.keys.size < FEW_DOCUMENTS:
        documents = documents.cut(spec.seq)
    is_val = held_out(documents.keys, config.dataset.val_fraction)
    train, val = documents.windows(~is_val, spec), documents.windows(is_val, spec)
    return require_samples(Dataset(name, vocab, fingerprint, train, val), config, spec, source)


def require_samples(dataset: Dataset, config: Config, spec: ModelSpec, source: str) -> Dataset:
    """The dataset, if `train` fills a global batch and `val` holds a sample; else EnvironmentProblem with the counts.

    source: what was read, with its resolved path and size, for the message. A val split smaller than a global batch is
    fine: evaluation then reads samples more than once.
    """
    batch = requested_batch(config)
    unit = f"samples of {spec.seq} tokens" if spec.kind == "tokens" else "samples"
    if len(dataset.train) < batch:
        raise EnvironmentProblem(
            Problem(
                f"{source} gives {len(dataset.train)} training {unit}, fewer than global_batch={batch}",
                where="dataset",
                suggestion=f"more data, a smaller model.seq, or global_batch of at most {max(1, len(dataset.train))}",
            )
        )
    if len(dataset.val) == 0:
        raise EnvironmentProblem(
            Problem(
                f"{source} gives no validation {unit} (dataset.val_fraction={config.dataset.val_fraction:g})",
                where="dataset.val_fraction",
                suggestion="a larger dataset.val_fraction, more data, or a smaller model.seq",
            )
        )
    return dataset
