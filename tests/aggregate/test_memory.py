"""No aggregator needs more memory than the stack and one more of its size."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ROWS, COLUMNS = 50, 400_000
PROGRAM = f"""
import json, resource, sys, torch
from partita import aggregate as agg
torch.set_num_threads(2)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
rules = {{
    "coordinate_median": agg.coordinate_median(), "trimmed_mean": agg.trimmed_mean(5), "krum": agg.krum(5),
    "multi_krum": agg.multi_krum(5, 3), "geometric_median": agg.geometric_median(),
    "centered_clipping": agg.centered_clipping(100.0),
    "smoothed_geometric_median": agg.smoothed_geometric_median(10.0, iterations=5),
    "smoothed_coordinate_median": agg.smoothed_coordinate_median(1.0, iterations=2),
    "layerwise": agg.layerwise({{"*": agg.coordinate_median()}}),
    "bucketing": agg.bucketing(2, agg.coordinate_median()), "nnm": agg.nnm(5, agg.coordinate_median()),
}}
def deltas(columns):
    g = torch.Generator().manual_seed(0)
    half = columns // 2
    return {{"a": torch.randn({ROWS}, half, generator=g), "b": torch.randn({ROWS}, half, generator=g)}}
weight = torch.ones({ROWS}).double()
weight[3] = 0  # a client is absent, so that rows are picked
chosen = {{k: rule for k, rule in rules.items() if k in sys.argv[1:]}}
for rule in chosen.values():  # libraries and threads are loaded
    rule.combine(deltas(5000), weight, torch.tensor(0))
x = deltas({COLUMNS})
base, found = peak(), {{}}
for name, rule in chosen.items():
    rule.combine(x, weight, torch.tensor(0))
    found[name] = peak() - base  # never less than that of the one before
print(json.dumps(found))
"""
SMALL = (
    "coordinate_median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "geometric_median",
    "centered_clipping",
    "smoothed_geometric_median",
    "smoothed_coordinate_median",
    "layerwise",
)


@pytest.mark.parametrize(("names", "limit"), [(SMALL, 1.0), (("bucketing",), 0.75), (("nnm",), 1.2)])
def test_the_peak_is_the_stack_and_at_most_one_more(names, limit) -> None:
    """Beyond the stack: blocks and results; the buckets, half a stack; the mixtures, a whole one."""
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for name, more in json.loads(done.stdout).items():
        assert more < limit * ROWS * COLUMNS * 4, (name, more / (ROWS * COLUMNS * 4))
