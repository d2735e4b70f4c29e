"""Tables of results: sequences of rows that become DataFrames, also in notebooks, where pandas is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from parallelrun.base.errors import EnvironmentProblem, Problem

if TYPE_CHECKING:
    import pandas
    from rich.console import Console

Item = TypeVar("Item")
_FIXED = "font-family:Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace"
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

    def _repr_html_(self) -> str | None:
        return notebook_table(self.rows())


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


def notebook_table(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """A table as pandas shows it; None, for which a notebook shows the repr, without pandas."""
    with suppress(EnvironmentProblem):
        return str(data_frame(rows).to_html(max_rows=60))
    return None


def html_text(text: str) -> str:
    """Plain lines as HTML, in a fixed font: the columns of tables stay below each other."""
    return f'<pre style="white-space:pre;line-height:normal;{_FIXED}">{escape(text)}</pre>'


def plain_text(show: Callable[[Console], None]) -> str:
    """Return the output of `show` as plain text, without spaces at the ends of lines."""
    from io import StringIO

    from rich.console import Console

    written = StringIO()
    plain: dict[str, Any] = dict.fromkeys(("force_terminal", "force_jupyter", "highlight", "emoji"), False)
    show(Console(file=written, width=_COLUMNS, **plain))
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())
