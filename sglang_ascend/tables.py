"""Tables of figures, as commands print them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def print_whole(table: Table) -> None:
    """As wide as it is: rich would cut figures to the terminal, or to 80 columns of a file.

    Names of tasks, models and languages are their authors': "[zh]" is no style.
    """
    from rich.console import Console

    console = Console(markup=False)
    wide = console.options.update(width=10_000)
    console.width = max(console.width, console.measure(table, options=wide).maximum)
    console.print(table)
