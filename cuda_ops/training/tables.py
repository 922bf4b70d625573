"""A table of a report, once as rows of text, and from them for the terminal and for report.md."""

Table = tuple[list[str], list[list[str]]]


def number(value, pattern: str) -> str:
    return "n/a" if value is None else format(value, pattern)


def ratio(over, under) -> str:
    return f"{over / under:.2f}×" if over and under else ""


def processes(settings: dict) -> str:
    """How many there were, and how they shared the training."""
    rounded = ", gradients summed in bfloat16" if settings["bf16_reduce"] else ""
    return f"{settings['processes']} processes ({settings['parallel']}{rounded})"


def markdown(table: Table) -> str:
    header, rows = table
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def to_rich(table: Table, title: str):
    """The table for rich's console."""
    from rich.table import Table as RichTable

    header, rows = table
    result = RichTable(title=title, title_justify="left")
    for i, name in enumerate(header):
        result.add_column(name, justify="right" if i else "left", no_wrap=i == 0)
    for cells in rows:
        result.add_row(*cells)
    return result
