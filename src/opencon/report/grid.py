"""A table of text, heads and rows, as Markdown or LaTeX; and how a mean with its spread is written."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence


def spread(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and standard deviation; no deviation of one value, neither of none."""
    if not values:
        return None, None
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def shown(mean: float | None, std: float | None, digits: int = 1) -> str:
    """As in 51.3 ± 1.5."""
    if mean is None:
        return ""
    return f"{mean:.{digits}f}" if std is None else f"{mean:.{digits}f} ± {std:.{digits}f}"


Cells = Collection[tuple[int, int]]  # row and column, from 0


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1, bold: Cells = ()) -> str:
    """The first columns hold text, the others numbers."""
    rule = ["---"] * text_columns + ["---:"] * (len(heads) - text_columns)
    cells = [[cell.replace("|", "\\|") for cell in line] for line in rows]
    lines = [heads, rule, *_marked(cells, bold, "**{}**")]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def latex(heads: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1, bold: Cells = ()) -> str:
    """A tabular with the rules of booktabs."""
    cells = _marked([[_tex(cell) for cell in line] for line in rows], bold, "\\textbf{{{}}}")
    lines = [" & ".join(line) + r" \\" for line in [[_tex(head) for head in heads], *cells]]
    body = "\n".join([lines[0], r"\midrule", *lines[1:]])
    columns = "l" * text_columns + "r" * (len(heads) - text_columns)
    return f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}"


def _marked(rows: Sequence[Sequence[str]], marked: Cells, mark: str) -> list[list[str]]:
    return [
        [mark.format(cell) if (i, j) in marked else cell for j, cell in enumerate(row)] for i, row in enumerate(rows)
    ]


def _tex(text: str) -> str:
    for special in ("\\", "&", "%", "$", "#", "_", "{", "}"):
        text = text.replace(special, r"\textbackslash " if special == "\\" else f"\\{special}")
    return text.replace("±", r"$\pm$").replace("×", r"$\times$")
