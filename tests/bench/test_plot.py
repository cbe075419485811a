"""The figures of a bench: every bar in its place, numbers on it, and files that open."""

from __future__ import annotations

import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import plot
from adapters.process import Speed
from drawing import figures, page, picture
from drawing.figures import Bench, Row
from partita import cli
from partita.cli.bench import WORKLOADS
from partita.engine.store.output import MARK
from support import each

DECLINED = "no <resnet20> is written in Haiku here"
ROWS = [
    Row(
        "logistic",
        4000.0,
        22400.0,
        "vmap",
        {"cohort": 0.02, "steps": 0.9, "server": 0.08},
        1e9,
        0.1,
        {"pfl": Speed(2800.0), "fedjax": Speed(4000.0), "flwr": Speed(None, "ImportError: ray")},
    ),
    Row("resnet20", 14.0, 15.0, "pool", {"steps": 1.0}, None, None, {"fedjax": Speed(None, DECLINED)}),
]
BENCH = Bench(ROWS, "2 CPU cores", "textbook loop")
browser = pytest.mark.skipif(picture.browser() is None, reason="no browser is installed")


def test_a_group_of_bars_for_each_row() -> None:
    found = figures.speeds(BENCH)
    bars = {trace["name"]: trace for trace in found["data"]}
    assert list(bars) == ["textbook loop", "pfl-research", "FedJAX", "Partita"]  # Flower has done nothing
    assert bars["textbook loop"]["text"] == ["4,000", "14"]
    assert bars["pfl-research"]["x"] == [2800.0, None]
    assert bars["pfl-research"]["text"] == ["2,800 · 0.70×", ""]
    assert bars["FedJAX"]["text"] == ["4,000 · 1.0×", ""]
    assert bars["Partita"]["text"] == ["<b>22,400 · 5.6×</b>", "<b>15 · 1.1×</b>"]
    assert len({trace["marker"]["color"] for trace in found["data"]}) == 4


@each(("slow", "fast"), [(3801.0, 21200.0), (0.02, 90000.0), (1.0, 1.0), (999.0, 1001.0)])
def test_the_axis_has_room_and_numbers(slow: float, fast: float) -> None:
    axis = figures.speeds(Bench([Row("x", slow, fast, "vmap", {})], "a GPU", "loop"))["layout"]["xaxis"]
    low, high = (10.0**x for x in axis["range"])
    assert low < slow <= fast < high
    assert axis["tickvals"]
    assert all(low <= x <= high for x in axis["tickvals"])


def test_the_parts_of_a_round_add_up() -> None:
    found = figures.phases(ROWS)
    assert found is not None
    assert [trace["name"] for trace in found["data"]] == ["steps", "cohort", "server"]
    assert [sum(xs) for xs in zip(*(trace["x"] for trace in found["data"]))] == pytest.approx([1.0, 1.0])
    assert [note["text"] for note in found["layout"]["annotations"]] == ["10 % overhead", "0 % overhead"]
    assert figures.phases([Row("x", 1.0, 2.0, "vmap", {})]) is None


@each(("ratio", "shown"), [(12.3, "12×"), (5.58, "5.6×"), (0.951, "1.0×"), (0.07, "0.07×")])
def test_ratios_as_people_read_them(ratio: float, shown: str) -> None:
    assert figures.times(ratio) == shown


def test_the_page_says_how_fast_and_who_has_no_bar() -> None:
    text = page.page(BENCH)
    assert "Rounds are 1.1 to 5.6 times as fast as those of the textbook loop" in text
    assert "No bar for FedJAX on resnet20: no &lt;resnet20&gt; is written in Haiku here." in text
    assert "No bar for Flower on logistic: ImportError: ray." in text
    assert WORKLOADS["resnet20"].about in text
    alone = page.page(Bench([Row("fedavg", 50.0, 80.0, "vmap", {})], "a GPU", "loop"))
    assert "Rounds are 1.6 times as fast as those of the loop" in alone
    assert 'data-figure="phases"' not in alone


@each("name", ["speed.pdf", "speed", "nowhere/speed.html", "folder.html"])
def test_files_that_cannot_be_made_are_refused_before_anything_is_measured(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ValueError, match="--out"):
        plot.checked(tmp_path / name)


def test_pictures_need_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "browser", lambda: None)
    for name in ("speed.svg", "speed.png"):
        with pytest.raises(ValueError, match=r"\.html.*chromium"):
            plot.checked(tmp_path / name)
    assert plot.checked(tmp_path / "speed.html")


@pytest.mark.parametrize("does", ["exit 1", "echo nothing"])
def test_a_browser_that_does_not_draw_is_told(
    does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "fake"
    fake.write_text(f"#!/bin/sh\n{does}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(picture, "browser", lambda: str(fake))
    with pytest.raises(OSError, match="html"):
        plot.draw(BENCH, tmp_path / "speed.svg")
    assert not (tmp_path / "speed.svg").exists()


@pytest.mark.slow
@browser
def test_pictures(tmp_path: Path) -> None:
    drawn = plot.draw(BENCH, tmp_path / "speed.svg").read_text()
    root = ElementTree.fromstring(drawn)
    words = " ".join(root.itertext())
    for text in ("22,400 · 5.6×", "2,800 · 0.70×", "FedJAX", "resnet20", "90 %", "10 % overhead", "Haiku"):
        assert text in words
    made = plot.draw(BENCH, tmp_path / "speed.png").read_bytes()
    assert made.startswith(b"\x89PNG")
    assert struct.unpack(">II", made[16:24]) == (
        2 * int(root.attrib["width"]),
        2 * int(root.attrib["height"]),
    )


def test_what_the_command_prints_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = WORKLOADS["logistic"]._replace(cohort=2, steps=1, batch=2, rounds=1, clients=4)
    monkeypatch.setitem(WORKLOADS, "logistic", little)
    fixed = ["--device", "cpu", "--executor", "loop", "--repeats", "1"]
    printed = CliRunner().invoke(cli.app, ["bench", "logistic", *fixed, "--json"])
    assert printed.exit_code == 0, printed.output
    lines, drawn = tmp_path / "speed.jsonl", tmp_path / "speed.html"
    lines.write_text(printed.stdout)
    plot.main([str(lines), "--out", str(drawn)])
    assert "logistic" in drawn.read_text()
    assert "textbook loop" in drawn.read_text()


def test_what_cannot_be_drawn_ends_with_code_2(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for words in ([str(empty)], [str(tmp_path / "missing")], [str(empty), "--out", "speed.pdf"]):
        with pytest.raises(SystemExit) as end:
            plot.main(words)
        assert end.value.code == 2


def test_files_of_others_are_never_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "browser", lambda: "a browser")
    white = bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
        "0000000c49444154789c63f8ffff3f0005fe02fe0def46b80000000049454e44ae426082"
    )
    contents = {
        "a.svg": b"<svg xmlns>theirs</svg>",
        "a.png": white,
        "a.html": b"theirs",
    }
    ours = {
        "b.svg": f"<svg xmlns>\n<!-- {MARK} --></svg>".encode(),
        "b.png": picture._marked(white),
    }
    for name, content in (contents | ours).items():
        (tmp_path / name).write_bytes(content)
    for name in contents:
        with pytest.raises(ValueError, match=r"^--out=.*something else is there"):
            plot.checked(tmp_path / name)
    for name in (*ours, "new.png", "new.html"):
        plot.checked(tmp_path / name)
    mine = tmp_path / "p.html"
    mine.write_text(page.page(BENCH))
    assert plot.checked(mine) == mine
