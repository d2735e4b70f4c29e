"""Conversations as text by a chat template, a jinja2 template in a sandbox, and which of its characters are answers.

Templates come from strangers. They run as transformers runs them, with the same functions and names, so that the text
is equal.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.data.tokenizing.tokenizer import TokenizerFile

KEY = "dataset.chat_template"
FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"  # beside a tokenizer.json
# Used where a tokenizer has no template, as for bytes.
BUILT_IN = """{% for message in messages %}
{{ '<|' + message['role'] + '|>\n' }}
{%- if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + '<|end|>\n' }}{% endgeneration %}
{% else %}
{{ message['content'] + '<|end|>\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>\n' }}
{%- endif %}
"""
ROLES = ("system", "user", "assistant")
Message = Mapping[str, Any]
Spans = list[tuple[int, int]]
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_START, _END = "\ufdd0", "\ufdd1"  # around an answer: no characters of any text, Unicode reserves them for programs
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OLDEST = (3, 1, 6)  # of jinja2: from earlier sandboxes, templates can escape


class TemplateFailed(Exception):
    """The template does not take a conversation; its text says why."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template: its source, its place for messages, and the special tokens that it may name (`bos_token`, ...)."""

    source: str
    place: str
    special: tuple[tuple[str, str], ...] = ()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps([self.source, self.special]).encode()).hexdigest()

    def render(self, messages: Sequence[Message], prompt: bool = False) -> tuple[str, Spans]:
        """(text, its answers as [start, stop) in characters: those in `{% generation %}` blocks).

        prompt: end with the beginning of an answer. Raises TemplateFailed.
        """
        names = {"tools": None, "documents": None, **dict(self.special)}
        try:
            marked = _compiled(self.source, self.place).render(messages=messages, add_generation_prompt=prompt, **names)
        except Exception as error:  # the template may raise anything, as its functions do
            raise TemplateFailed(f"{self.place}: {type(error).__name__}: {error}") from error
        before, *pieces = marked.split(_START)
        text, spans = before, []
        for piece in pieces:
            answer, _, rest = piece.partition(_END)
            spans.append((len(text), len(text) + len(answer)))
            text += answer + rest
        return text, spans

    def conversation(self, messages: Sequence[Message]) -> tuple[str, Spans]:
        """`render`; a template without `{% generation %}` blocks is asked for the text before and after each answer.

        Raises TemplateFailed, also if that is not how the whole text begins.
        """
        text, spans = self.render(messages)
        if _GENERATION.search(self.source):
            return text, spans
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self.render(messages[:number], prompt=True)[0], self.render(messages[: number + 1])[0]
            if not (text.startswith(after) and after.startswith(before)):
                cause = f"the text up to message {number + 1} changes with what follows it"
                raise TemplateFailed(f"{self.place}: {cause}; mark the answers by {{% generation %}} blocks")
            spans.append((len(before), len(after)))
        return text, spans


def find_template(path: str | None, tokenizer: TokenizerFile | None) -> ChatTemplate:
    """The template of a file, else that beside the tokenizer, else the built-in one. Raises ConfigError."""
    folder = tokenizer.path.parent if tokenizer else None
    settings = _settings(folder / CONFIG_FILE) if folder else {}
    special = tuple((name, text) for name in _SPECIAL if (text := _content(settings.get(name))) is not None)
    file = Path(path).expanduser().absolute() if path else folder / FILE if folder else None
    if file is not None and (path or file.is_file()):
        try:
            template = ChatTemplate(file.read_text(encoding="utf-8"), str(file), special)
        except (OSError, UnicodeError) as error:
            raise ConfigError(Problem(f"cannot read the chat template {file}: {error}", KEY)) from error
    else:
        own = settings.get("chat_template")
        if isinstance(own, list):  # several with names
            own = {each["name"]: each["template"] for each in own}.get("default")
        place = f"{folder}/{CONFIG_FILE}" if own else "the built-in chat template"
        template = ChatTemplate(own or BUILT_IN, place, special)
    _compiled(template.source, template.place)  # raises now what is wrong with it
    return template


@cache
def _compiled(source: str, place: str) -> Any:
    try:
        return _environment().from_string(source)
    except Exception as error:  # its own exceptions, and those of functions that constants are folded by
        raise ConfigError(Problem(f"{place} is no chat template: {error}", KEY)) from error


def _settings(path: Path) -> dict[str, Any]:
    """tokenizer_config.json; nothing if there is none. Raises ConfigError."""
    try:
        settings: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(Problem(f"{path} is no JSON: {error}", "dataset.tokenizer")) from error
    return settings


def _content(token: Any) -> str | None:
    """The text of a special token, which may be an object with more about it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


@cache
def _environment() -> Any:
    """jinja2's sandbox with what transformers offers to templates."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    if tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit()) < _OLDEST:
        message = f"chat templates need jinja2 3.1.6 or later; this is {jinja2.__version__}"
        raise EnvironmentProblem(Problem(message, KEY, command="pip install -U jinja2"))

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_START}{caller()}{_END}"

    class GuardedNamespace(Namespace):
        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a template cannot set {name!r}")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": GuardedNamespace,
    }
    return environment
