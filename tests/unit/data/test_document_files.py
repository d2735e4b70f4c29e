"""Documents of text, jsonl, parquet and arrow files: all of them, in order, and what is broken by file and row."""

from __future__ import annotations

import gzip
import json

import pytest

from parallelrun.base.errors import ConfigError, DataError, EnvironmentProblem
from parallelrun.data import document_files
from parallelrun.data.document_files import find_documents
from tests.extras import needs
from tests.unit.data.files import jsonl

TEXTS = ["one", "", "zwei é\r\n", "three " * 200]


def texts_of(path, column="text", split=None):
    files, _ = find_documents(path, column, split)
    return [row.text.decode() for file in files for row in file.rows()]


def told(path, error=DataError, column="text", split=None):
    with pytest.raises(error) as caught:
        texts_of(path, column, split)
    return str(caught.value)


def test_lines_are_documents_compressed_or_not_with_a_byte_order_mark_and_carriage_returns(tmp_path):
    content = jsonl(tmp_path / "a.jsonl", TEXTS).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n\r\n"))
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl"):
        assert texts_of(tmp_path / name) == TEXTS, name


def test_another_field_is_read_by_its_name(tmp_path):
    assert texts_of(jsonl(tmp_path / "a.jsonl", TEXTS, key="body"), "body") == TEXTS


@pytest.mark.parametrize(
    "line, said",
    [
        (b"{", "a.jsonl:2: no JSON"),
        (b'"text"', "a.jsonl:2: no JSON object with a 'text', but a str"),
        (b'{"body": "x", "id": 1}', "a.jsonl:2: no JSON object with a 'text'; it has 'body', 'id'"),
        (b'{"text": 7}', "a.jsonl:2: 'text' is no string, but 7"),
        (b'{"text": null}', "a.jsonl:2: 'text' is no string, but null"),
        (b'{"text": "\xff"}', "a.jsonl:2: no UTF-8 text"),
        (b'{"text": "\\ud800"}', "a.jsonl:2: no UTF-8 text"),
        (b"[" * 100_000, "a.jsonl:2: JSON that is nested too deeply"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, said):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
    assert said in told(tmp_path / "a.jsonl")


@pytest.mark.parametrize("cut", [slice(0, -20), slice(0, 5), slice(5, None)])
def test_a_damaged_compressed_file_is_named(tmp_path, cut):
    content = jsonl(tmp_path / "a.jsonl", [f"text {number}" for number in range(500)]).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content)[cut])
    assert "a.jsonl.gz:" in told(tmp_path / "a.jsonl.gz") and "damaged" in told(tmp_path / "a.jsonl.gz")


def test_a_long_text_is_read_in_parts_that_end_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(document_files, "TEXT_PIECE", 16)
    content = b"short\n" * 9 + b"a line that is longer than a part\r\n" + b"end"
    (tmp_path / "a.txt").write_bytes(content)
    (file,), _ = find_documents(tmp_path / "a.txt", "text", None)
    rows = list(file.rows())
    assert b"".join(row.text for row in rows) == content
    assert [row.ends for row in rows] == [False] * (len(rows) - 1) + [True] and len(rows) > 3
    assert all(row.text.endswith(b"\n") for row in rows[:-1])


def test_beside_tables_a_readme_is_no_document_and_other_texts_are(tmp_path):
    (tmp_path / "data").mkdir()
    jsonl(tmp_path / "data" / "a.jsonl", ["a"])
    for name in ("README.md", "dataset_infos.json", "b.txt"):
        (tmp_path / name).write_text(name)
    assert texts_of(tmp_path) == ["b.txt", "a"]
    (tmp_path / "data" / "a.jsonl").unlink()
    assert texts_of(tmp_path) == ["README.md", "b.txt", "dataset_infos.json"]


def test_of_a_folder_with_splits_only_one_is_read(tmp_path):
    for name in ("train-00000-of-00001", "validation-00000-of-00001", "x_test", "notes"):
        jsonl(tmp_path / f"{name}.jsonl", [name])
    assert texts_of(tmp_path) == ["notes", "train-00000-of-00001"]
    assert find_documents(tmp_path, "text", None)[1] == {"test": 1, "validation": 1}
    assert texts_of(tmp_path, split="test") == ["notes", "x_test"]
    assert "has no split dev; it has test, train, validation" in told(tmp_path, ConfigError, split="dev")
    (tmp_path / "train-00000-of-00001.jsonl").unlink()
    assert len(texts_of(tmp_path)) == 3  # no split is `train`: all of them are data


@needs("pyarrow")
class TestTables:
    @pytest.fixture
    def table(self):
        import pyarrow

        texts = [f"text {number}" for number in range(1000)]
        return pyarrow.table({"text": texts, "id": list(range(1000)), "also": texts})

    @pytest.fixture
    def parquet(self, table, tmp_path):
        from pyarrow.parquet import write_table

        write_table(table, tmp_path / "a.parquet", row_group_size=300, compression="none", use_dictionary=False)
        return tmp_path / "a.parquet"

    def test_every_row_of_a_parquet_file_is_a_document(self, table, parquet):
        assert texts_of(parquet) == table["text"].to_pylist()

    @pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
    def test_all_types_of_text_are_read(self, tmp_path, kind):
        import pyarrow

        column = pyarrow.array(TEXTS)
        column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pyarrow, kind)())
        made = pyarrow.table({"text": column})
        with pyarrow.ipc.new_file(tmp_path / "a.arrow", made.schema) as writer:
            writer.write_table(made)
        assert texts_of(tmp_path / "a.arrow") == TEXTS

    def test_a_missing_column_and_one_of_numbers_are_refused_with_the_names(self, parquet):
        assert "'body' is no column of" in told(parquet, ConfigError, "body")
        said = told(parquet, ConfigError, "id")
        assert "'id' is a column of int64, not of text" in said and "'text', 'also'" in said

    def test_an_empty_cell_is_named_by_its_row(self, tmp_path):
        import pyarrow
        from pyarrow.parquet import write_table

        write_table(pyarrow.table({"text": ["x"] * 700 + [None]}), tmp_path / "a.parquet")
        assert "a.parquet, row 701: 'text' is no string, but null" in told(tmp_path / "a.parquet")

    def test_a_broken_parquet_file_is_named_with_the_rows_that_were_good(self, parquet):
        content = bytearray(parquet.read_bytes())
        place = content.index(b"text 650") - 12
        content[place - 3000 : place] = b"\xff" * 3000  # inside the third row group
        parquet.write_bytes(content)
        said = told(parquet)
        assert "a.parquet" in said and ("damaged after row" in said or "row " in said)
        parquet.write_bytes(content[:5000])
        assert "a.parquet: damaged: " in told(parquet)

    @pytest.mark.parametrize("keep", [-8, -9, 0.5, 0])
    def test_a_torn_arrow_file_is_named(self, table, tmp_path, keep):
        import pyarrow

        with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
        content = (tmp_path / "a.arrow").read_bytes()
        (tmp_path / "a.arrow").write_bytes(content[: keep if keep < 0 else int(keep * len(content))])
        assert "a.arrow: damaged" in told(tmp_path / "a.arrow")

    def test_without_pyarrow_the_extra_is_named(self, parquet, monkeypatch):
        import sys

        monkeypatch.setitem(sys.modules, "pyarrow", None)
        assert "needs the package pyarrow" in told(parquet, EnvironmentProblem)

    def test_nothing_is_loaded_as_a_whole(self, tmp_path, monkeypatch):
        """Rows come before the rest of the file is read: a later row group may be damaged."""
        import pyarrow
        from pyarrow.parquet import write_table

        write_table(pyarrow.table({"text": ["x" * 5000] * 3000}), tmp_path / "a.parquet", row_group_size=100,
                    compression="none", use_dictionary=False)  # fmt: skip
        content = bytearray((tmp_path / "a.parquet").read_bytes())
        content[10_000_000:10_001_000] = b"\xff" * 1000
        (tmp_path / "a.parquet").write_bytes(content)
        (file,), _ = find_documents(tmp_path / "a.parquet", "text", None)
        rows = file.rows()
        assert all(next(rows).text == b"x" * 5000 for _ in range(1000))
        assert file.position < file.size / 2


@needs("datasets")
def test_what_datasets_saved_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    import datasets

    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict({"text": TEXTS * 50})
    made.save_to_disk(tmp_path / "one", num_shards=3)
    assert texts_of(tmp_path / "one") == TEXTS * 50
    made.select(range(3, 0, -1)).save_to_disk(tmp_path / "chosen")
    assert texts_of(tmp_path / "chosen") == TEXTS[3:0:-1]
    datasets.DatasetDict(train=made, test=made.select([2])).save_to_disk(tmp_path / "two")
    assert texts_of(tmp_path / "two") == TEXTS * 50
    assert find_documents(tmp_path / "two", "text", None)[1] == {"test": 1}
    assert texts_of(tmp_path / "two", split="test") == [TEXTS[2]]
    assert "has no split dev; it has train, test" in told(tmp_path / "two", ConfigError, split="dev")
    (tmp_path / "one" / "data-00001-of-00003.arrow").unlink()
    assert "names data-00001-of-00003.arrow, which is not there" in told(tmp_path / "one")
    state = json.loads((tmp_path / "chosen" / "state.json").read_text())
    (tmp_path / "chosen" / "state.json").write_text(json.dumps({**state, "_indices_data_files": [{"filename": "i"}]}))
    assert "separate order of its rows" in told(tmp_path / "chosen", EnvironmentProblem)
    (tmp_path / "chosen" / "state.json").write_text("{")
    assert "state.json is damaged" in told(tmp_path / "chosen")
