"""Where two traces differ, layer by token: the numbers behind the report's heat map.

Each cell counts the operator sites of one layer whose output bits differ at one token. Nothing
was grafted in such a pair of runs, so a difference shows where it starts and how it spreads; who
caused it is the culprit list's business.

    heat_map(Comparison(left_trace, right_trace))
"""

import re
from pathlib import Path

import numpy as np

from .compare import ABSENT, DIFFERENT, Comparison
from .plots import HeatMap
from .trace_store import load_trace

LAYER = re.compile(r"\blayers?\.(\d+)\b")


def heat_map(comparison: Comparison) -> HeatMap:
    """Count differing sites per layer and token; tokens in the order of the left run's requests."""
    trace = comparison.left
    lengths = [len(request.tokens) for request in trace.requests]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    names = {row_name(site.site): None for site in comparison.sites}
    index = {name: at for at, name in enumerate(names)}
    cells = np.full((len(index), int(offsets[-1])), -1, np.int32)
    columns = offsets[trace.table.request] + trace.table.position
    for site in comparison.sites:
        row = cells[index[row_name(site.site)]]
        compared = site.output.state != ABSENT
        seen = columns[site.rows[compared]]
        row[seen] = np.maximum(row[seen], 0)
        row[np.unique(columns[site.rows[site.output.state == DIFFERENT]])] += 1
    return HeatMap(
        rows=tuple(names),
        spans=tuple((request.id, len(request.tokens)) for request in trace.requests),
        cells=tuple(tuple(row) for row in cells.tolist()),
    )


def stored_heat_map(folder: Path) -> HeatMap:
    """The same from the two traces that ``localize`` left in a folder (``left`` and ``right``)."""
    return heat_map(Comparison(load_trace(folder / "left"), load_trace(folder / "right")))


def row_name(site: str) -> str:
    """``model.layers.3.mlp#gated`` -> ``layer 3``; outside the layers, the module's own name."""
    found = LAYER.search(site)
    return f"layer {found.group(1)}" if found else site.partition("#")[0].rpartition(".")[2]
