"""The summary of a run among real clients: seconds in place of virtual time, and no empty scores."""

from __future__ import annotations

from pathlib import Path

from deployed import deployed, experiment, simulated

import partita as pt
from partita.engine.record import Summary


def test_times_are_seconds_and_scores_that_nobody_tells_are_not_listed(tmp_path: Path) -> None:
    run, _ = deployed(experiment(), tmp_path)
    summary = Summary(run.summary())
    assert str(summary).count("accuracy") == 1
    text = str(Summary({**summary, "test": dict.fromkeys(summary["test"])}))
    assert "s of training:" in text
    assert "server steps per second" in text
    assert "virtual time" not in text
    assert "each client keeps those of its own model" in text
    assert "each alone" not in text


def test_a_simulation_has_virtual_time() -> None:
    summary = simulated(experiment(schedule=pt.schedule.asynchronous(concurrency=2))).summary()
    assert "virtual time" in str(summary)
    assert not summary["deployed"]


def test_the_page_leads_with_what_the_clients_tell(tmp_path: Path) -> None:
    run, _ = deployed(experiment(), tmp_path)
    page = (run.report(tmp_path / "page.html")).read_text()
    assert "3 clients have models of their own, with accuracy" in page
    assert "a unit of virtual time is a second" in page
    assert "nothing to compare personal models" not in page
