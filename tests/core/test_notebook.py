"""What notebooks are shown, and how one is told from a terminal."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import partita as pt
from partita.core import check
from partita.core.notebook import in_notebook, table
from partita.engine.callbacks import ProgressBar
from partita.recipes import Experiment
from partita.recipes.study import Study, Variant, run_study
from support import each

NAMES = ("<script>alert(1)</script>", "b & c", "d")
BALANCED = ("table", "thead", "tbody", "tr", "th", "td", "div", "details", "summary", "pre")


def data() -> pt.data.FederatedData:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 4)).astype("float32"), draw.integers(0, 2, 60)
    return pt.data.from_arrays(x, y, np.repeat(NAMES, 20), test=0.3, seed=0)


def run(**options: Any) -> pt.Run:
    given: dict[str, Any] = {"rounds": 1, "batch": 8, "baselines": False, **options}
    return pt.federate(pt.models.mlp(4, 3, 2), data(), pt.fedalt("output", lr=0.1), **given)


class Page(HTMLParser):
    """Opens and closes each tag, and has only these."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in BALANCED
        assert {name for name, _ in attrs} <= {"style"}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_every_object_has_a_short_table() -> None:
    result = run(metric=["accuracy", "auc"])
    shown = {
        "run": result,
        "summary": result.summary(),
        "client": result.client(0),
        "personalized": result.personalize(data()),
        "data": data(),
    }
    pages = {name: Page(thing._repr_html_()) for name, thing in shown.items()}  # type: ignore[attr-defined]
    assert NAMES[0] in pages["client"].words  # as text
    assert "output.linear.weight" in pages["client"].words
    for name in ("run", "summary", "personalized"):
        assert f"{shown['run'].summary()['test']['personal']:.4f}"[:3] in pages[name].words
    assert "test auc" in pages["run"].words
    assert str(result.summary()) in pages["run"].words
    for line in str(data()).splitlines():
        assert line.split()[-1] in pages["data"].words


def test_long_tables_are_cut_and_colours_are_those_of_the_theme() -> None:
    text = table("many", ("a", "b"), [(i, -i) for i in range(100)], note="a <note>")
    assert text.count("<tr>") == 21
    page = Page(text)
    assert "and 80 more" in page.words
    assert "a <note>" in page.words
    assert "color:" not in text.replace("border-color", "")


@each(
    ("shell", "expected"),
    [("ZMQInteractiveShell", True), ("TerminalInteractiveShell", False), ("NoneType", False)],
)
def test_a_notebook_is_told_from_a_terminal(
    shell: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = None if shell == "NoneType" else type(shell, (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    assert in_notebook() is expected


def test_nothing_is_imported_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)  # an import would fail
    assert not in_notebook()


@pytest.mark.parametrize("is_one", [True, False])
def test_a_run_shows_its_progress_in_a_notebook(is_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    monkeypatch.setattr("partita.api.in_notebook", lambda: is_one)
    monkeypatch.setattr("partita.engine.callbacks.in_notebook", lambda: is_one)
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # no terminal
    monkeypatch.setattr(
        ProgressBar, "start", lambda self, *_: started.append(self._progress.console.is_jupyter)
    )
    monkeypatch.setattr(ProgressBar, "round", lambda *_: None)
    run()
    assert started == [True] * is_one


def test_each_warning_is_given_once_in_a_study() -> None:
    experiment = Experiment(
        pt.models.mlp(4, 3, 2), data(), pt.fedalt("output", lr=0.1), rounds=1, baselines=False, state="reset"
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run_study(lambda _: Study({"one": Variant(experiment), "two": Variant(experiment)}), [0, 1])
        texts = [str(w.message) for w in heard]
        assert len(texts) == len(set(texts)) > 0
        experiment.run()
        assert len(heard) == 2 * len(texts)  # another run says it again
    assert {w.filename for w in heard} == {__file__}


def test_the_inner_scope_says_nothing_again() -> None:
    with warnings.catch_warnings(record=True) as heard, check.each_warning_once():
        warnings.simplefilter("always")
        check.warn("first")
        with check.each_warning_once():
            check.warn("first")
            check.warn("second")
        check.warn("second")
    assert [str(w.message) for w in heard] == ["first", "second"]


def test_what_is_said_goes_to_the_log(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    with caplog.at_level(logging.INFO, logger="partita"):
        run(baselines=True, out=tmp_path / "run")
    said = [record.getMessage() for record in caplog.records if record.name == "partita"]
    assert "baseline local: training local" in said
    assert f"fedalt: results in {tmp_path / 'run'}" in said
    assert any(isinstance(h, logging.NullHandler) for h in logging.getLogger("partita").handlers)
