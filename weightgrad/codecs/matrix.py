"""How a tensor is seen as a matrix by the codecs that work on columns."""

from __future__ import annotations

import math

from weightgrad.kernels.columns import MAX_TILE, Grid


def matrix_grid(shape: tuple[int, ...]) -> Grid:
    """Matrices as they are, filters as out x rest, anything else as one column; in tiles.

    A single column is cut into tiles of 32,768 too, so a flat bucket of many parameters has a
    pair of means for each of its pieces.
    """
    n = math.prod(shape)
    if len(shape) >= 2 and shape[0] and n:
        rows, cols = shape[0], n // shape[0]
        return Grid(rows, cols, min(MAX_TILE, rows)) if cols > 1 else Grid(n, 1, MAX_TILE)
    return Grid(n, 1, MAX_TILE)
