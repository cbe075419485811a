"""Every Python block of the documents runs, and so does every example."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from partita.recipes import find
from partita.recipes.experiment import build

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(text, id=f"{page.name}-{i}")
    for page in PAGES
    for i, text in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("text", BLOCKS)
def test_block_runs(text: str) -> None:
    names: dict[str, object] = {}
    exec(compile(text, "document", "exec"), names)
    if "run" in names:
        assert names["run"].summary()["test"]["personal"] > 0.9  # type: ignore[attr-defined]


def test_own_model_in_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    script = ROOT / "examples" / "own_model.py"
    lines = [
        x for x in script.read_text().splitlines() if x and not x.startswith(('"""', "import", "from", "#"))
    ]
    assert len(lines) <= 10
    runpy.run_path(str(script))
    table = capsys.readouterr().out.splitlines()
    scores = {line.split()[0]: float(line.split()[-1]) for line in table if "accuracy" in line}
    assert scores["personal"] > max(scores["each"], scores["one"])


def test_own_experiment_runs() -> None:
    experiment = build(
        find(str(ROOT / "examples" / "my_experiment.py")), {"rounds": 2, "clients": 8, "cohort": 4}
    )
    assert len(experiment.run(baselines=False).metrics) == 2


def test_every_file_that_the_design_names_exists() -> None:
    named = re.findall(r"`([a-z_/]+\.py)`", (ROOT / "docs" / "design.md").read_text())
    places = [ROOT, ROOT / "src" / "partita"]
    folders = [
        p for p in (ROOT / "src" / "partita").iterdir() if p.is_dir()
    ]  # `disk.py` after `store/memory.py`
    missing = [name for name in named if not any((place / name).exists() for place in [*places, *folders])]
    assert named
    assert not missing
