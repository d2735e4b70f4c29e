"""`dataset=chat path=FILE.jsonl [tokenizer=tokenizer.json]`: conversations, with a loss on the answers only.

A line has `messages`, each with a `role` (system, user, assistant) and a `content`, or a `prompt` and a `response`.
The tokenizer's chat template makes a text of it (`tokenizing.chat_template`). In the token files, a token that is no
answer is stored as ~id. Without a path, it reads a few small conversations that come with parallelrun.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.base.wording import counted
from parallelrun.config.schema.model_schema import DatasetConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import files
from parallelrun.data.arrays import NDArray, np
from parallelrun.data.document_files import DocumentFile, find_documents
from parallelrun.data.megatron import beside, read_documents, write_indexed
from parallelrun.data.progress import ReadingProgress
from parallelrun.data.text import TextFiles, tokenizer_file
from parallelrun.data.tokenizing.chat_template import ROLES, ChatTemplate, Message, TemplateFailed, find_template
from parallelrun.data.tokenizing.token_cache import cached_tokens, token_files
from parallelrun.data.tokenizing.tokenizer import NUM_BYTES, Tokenizer, load_tokenizer
from parallelrun.data.tokens import Documents
from parallelrun.planner.model.definitions import BYTES, Dataset
from parallelrun.planner.model.model_spec import ModelSpec

FORMAT = "chat/1"  # of what the same conversations, tokenizer and template give
EXAMPLE = Path(__file__).with_name("example_chat.jsonl")  # for a first try: a few kB
ELEMENT = np.dtype("<i4")


@dataclass(frozen=True)
class Truncation:
    """What conversations of more than seq + 1 tokens lose. left_out: conversations of which no answer is left."""

    conversations: int
    left_out: int
    tokens: int
    answer_tokens: int


class Chat(TextFiles):
    """Conversations of jsonl files, one a sample or packed. Each is cut off after `model.seq` + 1 tokens."""

    unread = ("column", "append_eod", "max_bytes")

    def vocab_size(self, config: Config) -> int:
        file = tokenizer_file(config)
        return file.vocab if file else NUM_BYTES

    def has_ignored(self, config: Config) -> bool:
        return True

    def chat_template(self, config: Config) -> str:
        return _template(config).source

    def settings(self, config: Config) -> dict[str, Any]:
        return {**super().settings(config), "sha256 of the chat template": _template(config).sha256}

    def is_ready(self, config: Config) -> bool:
        try:
            prefix = token_files(_files(config), *_facts(config))
        except (OSError, EnvironmentProblem):
            return True  # `open` says what is wrong
        return beside(prefix, ".idx").exists()

    def open(self, config: Config, spec: ModelSpec) -> Dataset:
        documents, digest = self._read(config)
        fitting, _ = truncated(documents, spec.seq)
        source = (
            f"{config.dataset.path or EXAMPLE} ({documents.keys.size} conversations, {documents.num_tokens} tokens)"
        )
        return fitting.open(spec.vocab, digest, config, spec, source)

    def notes(self, config: Config, spec: ModelSpec, dataset: Dataset) -> list[str]:
        documents, _ = self._read(config)
        loss = truncated(documents, spec.seq)[1]
        if not loss.conversations:
            return []
        share = f"{loss.conversations} of {counted(documents.keys.size, 'conversation')}"
        tokens = f"{counted(loss.tokens, 'token')} ({loss.answer_tokens} of answers)"
        note = f"{share} are longer than model.seq={spec.seq} tokens: {tokens} are cut off"
        return [note + (f"; {loss.left_out} without an answer before that are left out" if loss.left_out else "")]

    def _read(self, config: Config) -> tuple[Documents, str]:
        """(all conversations, uncut; their digest)."""
        try:
            documents = _files(config)
        except OSError as error:
            raise files.path_problem(f"cannot read {error.filename}: {error.strerror}") from error
        write = partial(_write, _template(config))
        read, digest = read_documents(cached_tokens(documents, *_facts(config), write=write))
        return replace(read, has_hidden=True), digest


def truncated(documents: Documents, seq: int) -> tuple[Documents, Truncation]:
    """The conversations with at most seq + 1 tokens of each, without those of which no answer is left."""
    (tokens,) = documents.sources
    is_left = np.ones(documents.lengths.size, dtype=bool)
    longer = np.flatnonzero(documents.lengths > seq + 1)
    num_answer_tokens = 0
    for index in longer.tolist():
        begin = int(documents.starts[index])
        cut, stop = begin + seq + 1, begin + int(documents.lengths[index])
        is_left[index] = bool((tokens[begin + 1 : cut] >= 0).any())
        num_answer_tokens += int((tokens[cut:stop] >= 0).sum())
    lengths = np.minimum(documents.lengths, seq + 1)
    lost = int((documents.lengths - lengths).sum())
    loss = Truncation(longer.size, int((~is_left).sum()), lost, num_answer_tokens)
    return replace(documents, lengths=lengths).choose(is_left), loss


def _files(config: Config) -> list[DocumentFile]:
    """The jsonl files. Raises EnvironmentProblem, ConfigError, OSError."""
    root = files.resolve_path(config, "conversations") if config.dataset.path else EXAMPLE
    documents, _ = find_documents(root, config.dataset.column, config.dataset.split)
    others = [file.path for file in documents if not file.is_jsonl]
    if others or not documents:
        message = f"{others[0]} is no .jsonl file" if others else f"{root} holds no file"
        raise ConfigError(Problem(f"{message}: dataset=chat reads conversations, one a line", "dataset.path"))
    return documents


def _template(config: Config) -> ChatTemplate:
    return find_template(config.dataset.chat_template, tokenizer_file(config))


def _facts(config: Config) -> tuple[str, Config, str, str]:
    """What decides the tokens, beside the files."""
    file = tokenizer_file(config)
    return (file.sha256 if file else BYTES), config, FORMAT, _template(config).sha256


def _write(template: ChatTemplate, prefix: Path, documents: Sequence[DocumentFile], settings: DatasetConfig) -> None:
    tokenizer = load_tokenizer(settings.tokenizer or BYTES, append_eod=False)
    progress = ReadingProgress("tokenizing")
    used = {"tokenizer": settings.tokenizer, "tokenizer_sha256": tokenizer.identity.sha256}
    note = {**used, "chat_template": template.place}
    encoded = ([tokens] for tokens in _encoded(documents, tokenizer, template, progress))
    write_indexed(prefix, encoded, ELEMENT, lambda: note)
    progress.close()


def _encoded(
    documents: Sequence[DocumentFile], tokenizer: Tokenizer, template: ChatTemplate, progress: ReadingProgress
) -> Iterator[NDArray[np.int64]]:
    """The tokens of each conversation as they are stored. Raises DataError naming the file and the line."""
    total, before, num_tokens = sum(file.size for file in documents), 0, 0
    for file in documents:
        for number, row in file.objects():
            try:
                text, answers = template.conversation(messages_of(row))
                stored = _stored(tokenizer, text, answers)
            except (TemplateFailed, ValueError) as error:
                raise file.broken(number, error) from error
            yield stored
            num_tokens += stored.size
            progress(before + file.position, total, num_tokens)
        before += file.size


def messages_of(row: Any) -> list[Message]:
    """The messages of a line. Raises ValueError with what is wrong with them."""
    if not isinstance(row, dict) or not ("messages" in row or {"prompt", "response"} <= row.keys()):
        has = ", ".join(map(repr, list(row)[:10])) or "nothing" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise ValueError(f"neither 'messages' nor 'prompt' and 'response'; it has {has}")
    messages = row.get("messages")
    if "messages" not in row:
        pairs = ("user", row["prompt"]), ("assistant", row["response"])
        messages = [{"role": role, "content": text} for role, text in pairs]
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' is no list with a message")
    for place, message in enumerate(messages, start=1):
        role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
        if role not in ROLES:
            raise ValueError(f"message {place} has the role {role!r}; the roles are {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"the content of message {place} is no string, but {json.dumps(content)[:40]}")
        content.encode()  # a lone surrogate, which JSON may have, is no text
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError("no message of the assistant, and the loss is on its answers only")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _stored(tokenizer: Tokenizer, text: str, answers: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """The tokens of a text, those that are no answer as ~id. A token on the border of an answer belongs to it."""
    tokens, places = tokenizer.encode_with_offsets(text)
    is_answer = np.zeros(tokens.size, dtype=bool)
    for start, stop in answers:
        inside = np.flatnonzero((places[:, 0] < stop) & (places[:, 1] > start))
        if inside.size:
            is_answer[inside[0] : inside[-1] + 1] = True
    if not is_answer[1:].any():
        raise ValueError("the chat template gives no token of an answer")
    return np.where(is_answer, tokens, ~tokens)


DATASET = Chat()
