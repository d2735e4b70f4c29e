"""Tables of results: sequences of rows that become DataFrames where pandas is installed, and HTML in notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from parallelrun.errors import EnvironmentProblem, Problem

if TYPE_CHECKING:
    import pandas
    from rich.console import Console

Item = TypeVar("Item")
_SHOWN = 60  # rows of a table in a notebook
_COLUMNS = 120  # of a report as text


@dataclass(frozen=True)
class ResultTable(Sequence[Item], Generic[Item]):
    """A sequence of `items`, each of which is a row with named values."""

    items: tuple[Item, ...]

    def row(self, item: Item) -> dict[str, Any]:
        """The values of an item by column."""
        raise NotImplementedError

    def rows(self) -> list[dict[str, Any]]:
        """All rows, as for `pandas.DataFrame`."""
        return [self.row(item) for item in self.items]

    def column(self, name: str) -> list[Any]:
        """One value of each row; None where a row does not have it."""
        return [row.get(name) for row in self.rows()]

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a DataFrame. Raises EnvironmentProblem without pandas."""
        return data_frame(self.rows())

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        return self.items[index]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows)"

    def _repr_html_(self) -> str:
        return html_table(self.rows())


@dataclass(frozen=True, repr=False)
class Metrics(ResultTable[Mapping[str, Any]]):
    """The steps of a run: `step`, `loss`, `lr`, `grad_norm`, `tokens_per_s` and the other keys of metrics.jsonl."""

    def row(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return dict(item)


def data_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """A DataFrame of rows. Raises EnvironmentProblem without pandas."""
    try:
        import pandas
    except ImportError as error:
        what = "a DataFrame needs pandas, which is not installed"
        raise EnvironmentProblem(Problem(what, "to_pandas", command="pip install 'parallelrun[notebook]'")) from error
    return pandas.DataFrame(list(rows))


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """An HTML table of the first rows, with every column that one of them has."""
    names = list(dict.fromkeys(name for row in rows[:_SHOWN] for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(_text(row.get(name)))}</td>' for name in names)}</tr>" for row in rows[:_SHOWN]
    )
    more = f"<p>... and {len(rows) - _SHOWN} more</p>" if len(rows) > _SHOWN else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def html_text(text: str) -> str:
    """Plain lines as HTML."""
    return f"<pre>{escape(text)}</pre>"


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def plain_text(show: Callable[[Console], None]) -> str:
    """Return the output of `show` as plain text, without spaces at the ends of lines."""
    from io import StringIO

    from rich.console import Console

    written = StringIO()
    plain: dict[str, Any] = dict.fromkeys(("force_terminal", "force_jupyter", "highlight", "emoji"), False)
    show(Console(file=written, width=_COLUMNS, **plain))
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())
