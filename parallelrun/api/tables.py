"""Tables of results: sequences of rows that become DataFrames where pandas is installed, and HTML in notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from parallelrun.base.errors import EnvironmentProblem, Problem

if TYPE_CHECKING:
    import pandas
    from rich.console import Console

Item = TypeVar("Item")
SWEPT_RESULTS = (  # that a notebook shows of a sweep, the most important first
    "loss", "val_loss", "val_top1", "max_error.params", "step_time_median_s", "median_s", "tokens_per_s",
    "bubble_predicted", "peak_memory_bytes", "wire_bytes_per_step",
)  # fmt: skip
_SHOWN = 60  # rows of a table in a notebook
_MOST_COLUMNS = 10  # of a table in a notebook, unless more are asked for
_FIXED = "font-family:Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace"
_COLUMNS = 120  # of a report as text


@dataclass(frozen=True)
class ResultTable(Sequence[Item], Generic[Item]):
    """A sequence of `items`, each of which is a row with named values."""

    items: tuple[Item, ...]

    def leading(self) -> list[str]:
        """The columns that a notebook shows first."""
        return []

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

    def show(self, *columns: str) -> HtmlTable:
        """The table in a notebook with these columns; without names, with all of them."""
        rows = self.rows()
        return HtmlTable(html_table(rows, columns or _names(rows)))

    def _repr_html_(self) -> str:
        rows = self.rows()
        names = list(dict.fromkeys([*self.leading(), *_names(rows)]))
        filled = [name for name in names if any(row.get(name) not in (None, "") for row in rows)][:_MOST_COLUMNS]
        num_more = len(_names(rows)) - len(filled)
        more = f"<p>{num_more} more columns: .show() or .to_pandas()</p>" if num_more else ""
        return html_table(rows, filled) + more


@dataclass(frozen=True)
class HtmlTable:
    """A table that a notebook shows."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


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
        cause = "a DataFrame needs pandas, which is not installed"
        raise EnvironmentProblem(Problem(cause, "to_pandas", command="pip install 'parallelrun[notebook]'")) from error
    return pandas.DataFrame(list(rows))


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns that any of the rows has."""
    return list(dict.fromkeys(name for row in rows for name in row))


def html_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> str:
    """An HTML table of the first rows, in a fixed font. names: of the columns; empty: all."""
    names = names or _names(rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(_text(row.get(name)))}</td>' for name in names)}</tr>" for row in rows[:_SHOWN]
    )
    more = f"<p>... and {len(rows) - _SHOWN} more</p>" if len(rows) > _SHOWN else ""
    return f'<table style="{_FIXED}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}'


def html_text(text: str) -> str:
    """Plain lines as HTML, in a fixed font: the columns of tables stay below each other."""
    return f'<pre style="white-space:pre;line-height:normal;{_FIXED}">{escape(text)}</pre>'


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
