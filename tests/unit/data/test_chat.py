"""`dataset=chat`: which tokens are targets, what is cut off, what is refused, and the same tokens as transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallelrun.base.errors import ConfigError, DataError
from parallelrun.data import chat, open_dataset
from parallelrun.data.document_files import DocumentFile
from parallelrun.data.tokenizing.chat_template import ChatTemplate, TemplateFailed, find_template
from parallelrun.data.tokenizing.tokenizer import find_tokenizer, load_tokenizer
from parallelrun.planner.model import definitions
from parallelrun.planner.model.definitions import IGNORED
from parallelrun.planner.resolve.resolve_config import resolve
from tests.extras import needs
from tests.plans import tiny_config

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Größe?"},
    {"role": "assistant", "content": "12 m  "},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "I measured — twice."},
]
CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{%- for message in messages -%}{%- if loop.first and message.role == 'system' %}[{{ message.content }}]\n"
    "{% continue %}{% endif %}<|im_start|>{{ message.role }}: "
    "{%- if message.role == 'assistant' -%}{%- generation -%}{{ message.content }}<|im_end|>{%- endgeneration -%}"
    "{%- else -%}{{ message | tojson }}{% endif %}\n{% endfor %}{% set ns = namespace(n=0) %}"
    "{% for message in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(tmp_path: Path, path: Path, **more: Any) -> Any:
    keys = {key.replace("__", "."): value for key, value in more.items()}
    data = {"dataset.name": "chat", "dataset.path": str(path), "dataset.cache": str(tmp_path / "cache")}
    return tiny_config({"global_batch": 2, "model.seq": 64, "model.vocab": None, **data, **keys})


def opened(config: Any) -> definitions.Dataset:
    return open_dataset(config, resolve(config).spec)


def targets_of(split: definitions.Split, index: int) -> str:
    targets = split.sample(index)[1]
    return bytes(target for target in targets.tolist() if target != IGNORED).decode()


def pairs(number: int) -> list[dict[str, str]]:
    return [{"prompt": f"q{index}", "response": f"answer {index}"} for index in range(number)]


def test_only_answers_are_targets_and_each_follows_its_prompt(tmp_path: Path) -> None:
    config = config_of(tmp_path, write(tmp_path / "talks.jsonl", [{"messages": TALK}] * 4), model__seq=200)
    dataset = opened(config)
    inputs, targets = dataset.train.sample(0)
    text = "".join(f"<|{message['role']}|>\n{message['content']}<|end|>\n" for message in TALK).encode()
    assert bytes(inputs[: len(text) - 1].tolist()) == text[:-1] and not inputs[len(text) - 1 :].any()
    assert targets_of(dataset.train, 0) == "12 m  <|end|>\nI measured — twice.<|end|>\n"
    for place in range(len(text) - 1):
        assert targets[place] in (IGNORED, text[place + 1])
    assert dataset.has_ignored and resolve(config).spec.has_ignored and not dataset.train.packs


def test_a_prompt_and_a_response_are_two_messages(tmp_path: Path) -> None:
    dataset = opened(config_of(tmp_path, write(tmp_path / "pairs.jsonl", pairs(30))))
    texts = [targets_of(dataset.train, index) for index in range(len(dataset.train))]
    assert len(dataset.train) + len(dataset.val) == 30
    assert all(text.startswith("answer ") and text.endswith("<|end|>\n") for text in texts)


def test_packed_conversations_are_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", pairs(30))
    single = opened(config_of(tmp_path, path, model__seq=200))
    packed = opened(config_of(tmp_path, path, model__seq=200, dataset__pack=True))
    assert packed.train.packs and len(packed.train) < len(single.train) / 2
    assert packed.fingerprint != single.fingerprint

    def answers(split: definitions.Split) -> list[str]:
        return sorted("".join(targets_of(split, index) for index in range(len(split))).split("<|end|>\n"))

    assert answers(packed.train)[-5:] == answers(single.train)[-5:]
    assert sum(packed.train.document_lengths(0)) <= 200 and packed.train.document_lengths(0).size > 2


def test_what_is_cut_off_is_counted(tmp_path: Path) -> None:
    rows = [*pairs(10), {"prompt": "p" * 30, "response": "r" * 60}, {"prompt": "p" * 90, "response": "r"}]
    config = config_of(tmp_path, write(tmp_path / "rows.jsonl", rows), dataset__val_fraction=0.3)
    dataset = opened(config)
    assert len(dataset.train) + len(dataset.val) == 11
    text = len(b"<|user|>\n<|end|>\n<|assistant|>\n<|end|>\n")
    lost = (text + 90 - 65) + (text + 91 - 65)
    (note,) = definitions.dataset(config).notes(config, resolve(config).spec, dataset)
    said = f"2 of 12 conversations are longer than model.seq=64 tokens: {lost} tokens"
    assert note.startswith(said) and "1 without an answer before that are left out" in note
    cut = [
        split
        for split in (dataset.train, dataset.val)
        for index in range(len(split))
        if "rrr" in targets_of(split, index)
    ]
    assert len(cut) == 1


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"text": "hi"}, "neither 'messages' nor 'prompt' and 'response'; it has 'text'"),
        (["hi"], "it has a list"),
        ({"messages": []}, "no list with a message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "message 1 has the role 'tool'"),
        ({"messages": ["hi"]}, "message 1 has the role None"),
        ({"prompt": "a", "response": ["b"]}, "the content of message 2 is no string"),
        ({"prompt": "a", "response": "\ud800"}, "surrogates not allowed"),
        ({"messages": TALK[:2]}, "no message of the assistant"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path: Path, row: Any, cause: str) -> None:
    path = write(tmp_path / "rows.jsonl", [*pairs(3), row])
    with pytest.raises(DataError, match=r"rows\.jsonl:4: ") as caught:
        opened(config_of(tmp_path, path))
    assert cause in str(caught.value)
    assert not [file for file in (tmp_path / "cache").iterdir() if file.suffix != ".lock"]


def test_a_template_that_refuses_a_line_and_one_that_is_none_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*pairs(2), {"messages": TALK}])
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    (tmp_path / "own.jinja").write_text(refuses)
    with pytest.raises(DataError, match=r"rows\.jsonl:3: .*own\.jinja: TemplateError: no system"):
        opened(config_of(tmp_path, path, dataset__chat_template=str(tmp_path / "own.jinja")))
    (tmp_path / "own.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match=r"own\.jinja is no chat template"):
        opened(config_of(tmp_path, path, dataset__chat_template=str(tmp_path / "own.jinja")))
    with pytest.raises(ConfigError, match="cannot read the chat template"):
        opened(config_of(tmp_path, path, dataset__chat_template=str(tmp_path / "gone.jinja")))


def test_templates_run_in_a_sandbox() -> None:
    for source in ("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "{{ messages.clear() }}"):
        with pytest.raises(TemplateFailed, match=r"SecurityError"):
            ChatTemplate(source, "t").render([{"role": "user", "content": ""}])


def test_a_text_that_changes_with_what_follows_needs_marks() -> None:
    last_only = "{% for m in messages %}{{ m.role if loop.last else '' }}{{ m.content }}{% endfor %}"
    with pytest.raises(TemplateFailed, match=r"message 3 .*{% generation %}"):
        ChatTemplate(last_only, "t").conversation(TALK)


def test_another_template_or_file_gives_other_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", pairs(5))
    (tmp_path / "own.jinja").write_text(CHATML)
    own = config_of(tmp_path, path, dataset__chat_template=str(tmp_path / "own.jinja"))
    first, second = opened(config_of(tmp_path, path)), opened(own)
    assert first.fingerprint != second.fingerprint and first.settings != second.settings
    write(path, pairs(6))
    assert opened(own).fingerprint != second.fingerprint


def test_models_that_mask_tokens_and_files_that_are_no_jsonl_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", pairs(5))
    with pytest.raises(ConfigError, match="masks its own"):
        resolve(config_of(tmp_path, path, model__name="bert"))
    with pytest.raises(ConfigError, match=r"rows\.txt is no \.jsonl file"):
        opened(config_of(tmp_path, path.rename(tmp_path / "rows.txt")))


@needs("transformers")
@pytest.mark.parametrize("in_config", [True, False])
@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_tokens_and_answers_are_those_of_transformers(tmp_path: Path, source: str, in_config: bool) -> None:
    import tokenizers
    import transformers

    trained = tokenizers.ByteLevelBPETokenizer()
    text = "Be brief. I measured the size of it twice and the answer is what the user and the assistant said. "
    trained.train_from_iterator([text] * 50, 400, special_tokens=["<s>", "<|im_start|>", "<|im_end|>"])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, bos_token="<s>", eos_token="<|im_end|>"
    )
    fast.chat_template = source
    fast.save_pretrained(tmp_path, save_jinja_files=not in_config)
    assert (tmp_path / "chat_template.jinja").exists() != in_config
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    talks = [TALK, TALK[1:3], [*TALK[:2], {"role": "assistant", "content": "<|im_end|> \n é 𝛼🙂"}]]
    rows = write(tmp_path / "rows.jsonl", [{"messages": talk} for talk in talks])
    template = find_template(None, find_tokenizer(str(tmp_path), ""))
    encoded = chat._encoded(
        [DocumentFile(rows, "", 1)], load_tokenizer(str(tmp_path), False), template, lambda *_: None
    )
    for talk, stored in zip(talks, encoded, strict=True):
        ids = [token if token >= 0 else ~token for token in stored.tolist()]
        marked = source == MARKED
        expected = theirs.apply_chat_template(talk, return_assistant_tokens_mask=marked, return_dict=True)
        assert ids == expected["input_ids"]
        answers = [int(token >= 0) for token in stored.tolist()]
        if marked:
            assert answers == expected["assistant_masks"]
            continue
        said = theirs.decode([token for token, is_answer in zip(ids, answers) if is_answer])
        assert said == "".join(m["content"].strip() + "<|im_end|>\n" for m in talk if m["role"] == "assistant")
