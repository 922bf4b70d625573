"""Tables on the terminal, with rich where it is installed."""


def print_table(title, columns, rows, styles=None):
    """With rich where it is installed, else in columns of plain text. `styles`: rich's style of each row, or None."""
    rows = [[str(value) for value in row] for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        print(f"\n{title}")
        for row in [columns, *rows]:
            print("  " + "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(title=title, title_justify="left", show_header=any(columns), title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row, style in zip(rows, styles or [None] * len(rows), strict=True):
        table.add_row(*map(Text, row), style=style)  # Text: brackets in a value are no markup
    console = Console()
    # Into a pipe or a file, which have no width, nothing is to be folded.
    if not console.is_terminal:
        console = Console(width=Console(width=1000).measure(table).maximum)
    console.print(table)
