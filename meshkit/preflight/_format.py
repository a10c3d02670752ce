"""Bytes, mesh axes and tables as text, as estimates, explanations and checks print them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

GIB, MIB = 2**30, 2**20


def format_bytes(size: int) -> str:
    """4096 as 4.00 KiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def format_axes(values: Mapping[str, int], *, omit: int) -> str:
    """`dp_shard=2 tp=4`, without the axes whose value is `omit`."""
    return " ".join(f"{axis}={value}" for axis, value in values.items() if value != omit)


def table_lines(rows: Iterable[tuple[str, ...]], *, right: Collection[int] = ()) -> list[str]:
    """One line for each row, cells padded to the width of their column. right: columns of numbers, aligned to the right."""
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
