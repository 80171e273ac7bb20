"""The process that makes the map: python -m opencon.review.mapping EMBEDDINGS MAP. t-SNE takes seconds, and scikit-learn."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from opencon.files import write_whole
from opencon.report.map import map_positions
from opencon.review.session import fitted_in


def make_map(embeddings: Path, out: Path) -> None:
    """Positions of the photos, (n, 2) in the unit square."""
    if hasattr(os, "nice"):
        os.nice(10)  # somebody waits for the page meanwhile
    _, xy = map_positions(np.load(embeddings, allow_pickle=False), seed=0)

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            np.save(file, fitted_in(xy), allow_pickle=False)

    write_whole(out, write)


if __name__ == "__main__":
    make_map(Path(sys.argv[1]), Path(sys.argv[2]))
