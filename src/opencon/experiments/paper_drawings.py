"""The paper's figures from what a sweep has measured: lines, bars, embeddings side by side, distributions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opencon.experiments.paper import Manifest, Plan, row_of
from opencon.experiments.sweep import Sweep
from opencon.experiments.sweep_table import SweepRow
from opencon.report.paper_figures import distribution_figure
from opencon.report.side_by_side import Panel, maps_figure
from opencon.report.sweep_chart import Point, bars_chart, sweep_chart


def draw_figures(plan: Plan, sweep: Sweep, folder: Path) -> list[Path]:
    """Every figure of which something has been measured."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for manifest in plan.manifests:
        if manifest.kind != "figure":
            continue
        rows = [row_of(sweep, row, plan.means) for row in manifest.rows]
        path = folder / f"{manifest.name}.png"
        if any(row.done for row in rows) and _draw(manifest, rows, path, plan.title(manifest)):
            drawn.append(path)
    return drawn


def _draw(manifest: Manifest, rows: Sequence[SweepRow], path: Path, title: str) -> bool:
    """Draw one; False where what was measured is not enough."""
    if manifest.draw in ("lines", "bars"):
        series: dict[str, list[Point]] = {}
        for row in rows:
            mean, std = row.score(manifest.columns[0])
            name = ", ".join(value for key, value in row.labels.items() if key != manifest.x)
            if mean is not None:
                series.setdefault(name, []).append((row.labels[manifest.x], mean, std))
        if manifest.draw == "bars":
            bars_chart(series, y_title="all (%)", title=title, path=path)
        else:
            sweep_chart(series, x_title=manifest.x, y_title="all (%)", title=title, path=path)
        return True
    drawn = [(row, row.done[0]["result"].get("embedding")) for row in rows if row.done]
    panels: list[tuple[str, dict[str, Any]]] = [
        (", ".join(row.labels.values()), data) for row, data in drawn if data is not None
    ]
    if not panels:  # runs from elsewhere come without
        return False
    if manifest.draw == "umap":
        found = [
            Panel(name, data["z"], data["truth"], data["num_seen"], {int(c): text for c, text in data["names"].items()})
            for name, data in panels
        ]
        maps_figure(found, number=manifest.classes, title=title, path=path)
        return True
    with_score = [(name, data) for name, data in panels if "seen" in data]
    if not with_score:
        return False
    _, data = with_score[0]
    distribution_figure(data["seen"], data["novel"], threshold=data["threshold"], title=title, path=path)
    return True
