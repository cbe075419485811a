"""The report in a real browser: drawn, complete, quiet, and in its place on every screen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from report_rows import attacked, client, example, fake, measured, timed

from partita import report
from partita.engine.record import Record

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for found in map(shutil.which, NAMES) if found), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason=f"no browser: none of {', '.join(NAMES)} is installed"
)

LAPTOP, PHONE = (1280, 900), (390, 844)
PATIENCE = 300_000  # milliseconds: more than a busy machine needs
EVIL = "<b>@0</b> &amp;</script><script>document.title='evil'</script>"
LONG = "a-very-long-name-of-a-client-without-any-place-to-break-" * 4


def runs() -> dict[str, dict[str, list[Record]]]:
    """The pages that are opened."""
    odd = example(clients=12)
    odd.clients[0] |= {"client": EVIL, "n_train": 9000, "personal": 0.99, "global": 0.1}
    odd.clients[1] |= {"client": LONG, "personal": 0.0, "global": 0.9}
    odd.config["algorithm"][LONG] = LONG
    bare = fake(client("only", 2.0, 3.0), higher_is_better=False, metric="mse")
    labels = {"fedalt": 0.06, "fedavg": 0.0, "fedalt adapter": 0.05}
    return {
        "single": {"fedalt": [example(train=True)]},
        "several": {k: [example(k, seed, gain=g) for seed in (0, 1)] for k, g in labels.items()},
        "odd": {"fedalt": [odd]},
        "bare": {"x": [bare]},
        "empty": {"x": [fake(client("a", None))]},
        "followed": {k: [measured(k, seed) for seed in (0, 1)] for k in ("fedalt", "fedavg")},
        "byzantine": {"fedalt": [attacked()]},
        "clocks": {
            "asynchronous": [timed(seed=seed) for seed in (0, 1)],
            "synchronous": [timed(pace=6.0, stale=False)],
        },
        "clock": {"fedalt": [timed()]},
    }


@dataclass
class Opened:
    """A page in the browser, and everything it complained about or asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class Reports:
    """Opens reports; one browser for all of them."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self.browser, self.folder = browser, folder
        self.known: dict[str, Opened] = {}

    def shared(self, name: str) -> Opened:
        """A page that several tests look at: reading megabytes of plotly.js takes a while."""
        if name not in self.known:
            self.known[name] = self.open(name)
        return self.known[name]

    def open(self, name: str, size: tuple[int, int] = LAPTOP) -> Opened:
        """A fresh page."""
        view = {"width": size[0], "height": size[1]}
        context = self.browser.new_context(viewport=view, color_scheme="light", has_touch=size == PHONE)
        context.set_default_timeout(PATIENCE)
        found = Opened(context.new_page())
        found.page.on("console", lambda m: found.complaints.append(f"{m.type}: {m.text}"))
        found.page.on("pageerror", lambda e: found.complaints.append(str(e)))
        found.page.on("request", lambda r: found.requests.append(r.url))
        context.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
        found.page.goto((self.folder / f"{name}.html").as_uri())
        wait_for(found.page, "'drawn' in document.documentElement.dataset")
        return found


def wait_for(page: Any, condition: str) -> None:
    """Ask until it is true; `wait_for_function` would ask in the page, whose policy forbids `eval`."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(condition)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reports]:
    folder = tmp_path_factory.mktemp("reports")
    for name, labels in runs().items():
        report.write(labels, folder / f"{name}.html")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE
        )
        yield Reports(browser, folder)
        browser.close()


def overflow(page: Any) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def drawn(page: Any) -> dict[str, int]:
    """How many points, lines and violins each figure shows."""
    script = """fs => Object.fromEntries(fs.map(f => [f.dataset.figure, f.querySelectorAll(
        '.points path, .lines path.js-line, path.violin').length]))"""
    return dict(page.eval_on_selector_all("[data-figure]", script))


def background(page: Any) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.mark.parametrize("name", ["single", "several"])
def test_drawn_quiet_and_in_its_place(reports: Reports, name: str) -> None:
    opened = reports.shared(name)
    sections = opened.page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    expected = {"summary", "curves", "clients", "distribution", "hurt", "cost", "settings"}
    assert expected | ({"comparison"} if name == "several" else set()) <= set(sections)
    figures = {"curves", "losses", "clients", "violins"} | ({"violins_train"} if name == "single" else set())
    for size in (LAPTOP, PHONE):
        for scheme in ("light", "dark"):
            look(opened.page, size, scheme)
            counts = drawn(opened.page)
            assert set(counts) == figures
            assert counts["clients"] == 40
            assert min(counts.values()) > 0
            red, green, blue = (int(x) for x in background(opened.page)[4:-1].split(","))
            assert (red + green + blue < 200) == (scheme == "dark")
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith("file:")] == []


FOLLOWED = {
    "gradient_norm.total",
    "gradient_norm.mean",
    "aggregation_change.mean",
    "line_loss.loss",
    "aggregation.iterations",
}


def test_measures_are_drawn(reports: Reports) -> None:
    opened = reports.open("followed")
    for size in (LAPTOP, PHONE):
        for scheme in ("light", "dark"):
            look(opened.page, size, scheme)
            counts = drawn(opened.page)
            assert set(counts) >= FOLLOWED
            assert min(counts[name] for name in FOLLOWED) > 2
    read = "document.querySelector(`[data-figure='{}']`).layout.{}"
    assert opened.page.evaluate(read.format("gradient_norm.total", "yaxis.type")) == "log"
    assert opened.page.evaluate(read.format("aggregation_change.mean", "yaxis.type")) == "linear"
    ends = opened.page.locator("[data-figure='line_loss.loss'] .xtick").all_text_contents()
    assert ends == ["own model", "halfway", "aggregated"]
    hidden = "all => all.some(e => e.style.opacity === '0' || e.style.display === 'none')"
    ticks = "[data-figure='line_loss.loss'] .xtick text"
    assert not opened.page.eval_on_selector_all(ticks, hidden)
    opened.page.click("button[data-value=seconds]")  # the measures stay with the rounds
    assert opened.page.evaluate(read.format("gradient_norm.total", "xaxis.title.text")) == "round"
    assert opened.complaints == []


TIMES = {"time.scores", "time.active", "time.delays", "time.ages"}


@pytest.mark.parametrize("name", [pytest.param("clock", marks=pytest.mark.slow), "clocks"])
def test_virtual_time_is_drawn(reports: Reports, name: str) -> None:
    opened = reports.open(name)
    page = opened.page
    assert "reaches accuracy" in page.locator("#time").text_content()
    for size in (LAPTOP, PHONE):
        for scheme in ("light", "dark"):
            look(page, size, scheme)
            counts = drawn(page)
            assert set(counts) >= TIMES
            assert min(counts[figure] for figure in TIMES) > 0
    look(page, LAPTOP, "light")
    read = "document.querySelector(`[data-figure='{}']`).layout.{}"
    assert page.evaluate(read.format("time.delays", "xaxis.type")) == "log"
    assert page.evaluate(read.format("time.scores", "xaxis.title.text")) == "virtual time"
    page.click("button[data-value=seconds]")  # these stay with virtual time
    assert drawn(page)["time.scores"] == counts["time.scores"]
    place = page.locator("[data-figure='time.ages']")
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "steps old" in place.locator(".hoverlayer").text_content()
    assert opened.complaints == []


def test_byzantine_clients_are_not_drawn(reports: Reports) -> None:
    opened = reports.open("byzantine")
    assert drawn(opened.page)["clients"] == 30
    assert "10 of 40 clients are Byzantine (sign_flip)" in opened.page.locator("header").text_content()
    assert opened.complaints == []


def look(page: Any, size: tuple[int, int], scheme: str) -> None:
    """Turn to this screen; the page and all figures must fit it and have the theme's colours."""
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.emulate_media(color_scheme=scheme)
    assert overflow(page) <= 0
    wait_for(  # figures follow a moment later
        page,
        """() => [...document.querySelectorAll('[data-figure]')].every(f =>
        f.querySelector('.main-svg').getBoundingClientRect().right <= innerWidth && f.layout.font.color ===
        getComputedStyle(document.documentElement).getPropertyValue('--text').trim())""",
    )


@pytest.mark.parametrize("name", ["odd", pytest.param("bare", marks=pytest.mark.slow), "empty"])
def test_odd_runs_are_drawn_too(reports: Reports, name: str) -> None:
    opened = reports.open(name, PHONE)
    assert opened.complaints == []
    assert overflow(opened.page) <= 0
    assert opened.page.title() != "evil"
    points = drawn(opened.page)
    assert points.get("clients", 0) == {"odd": 12, "bare": 1, "empty": 0}[name]
    opened.page.eval_on_selector_all("details", "all => all.forEach(d => d.open = true)")
    assert overflow(opened.page) <= 0


def test_hover_names_the_client_as_it_is_called(reports: Reports) -> None:
    page = reports.open("odd").page
    # the client with by far the most samples and a large gain is alone at the top right
    target = page.evaluate(
        """() => { const f = document.querySelector('[data-figure=clients]'); f.scrollIntoView();
        const i = f.data.findIndex(t => t.name.startsWith('better')), x = f.data[i].x;
        const p = f.querySelectorAll('.scatterlayer .trace')[i].querySelectorAll('.points path');
        const b = p[x.indexOf(Math.max(...x))].getBoundingClientRect();
        return [b.x + b.width / 2, b.y + b.height / 2] }"""
    )
    page.mouse.move(*target)
    text = page.locator("[data-figure=clients] .hovertext").text_content()
    assert EVIL[:20] in text
    assert "9,000 training samples" in text
    assert "global 0.1000" in text
    assert "personal 0.9900" in text


def test_the_theme_button_turns_page_and_figures(reports: Reports) -> None:
    page = reports.open("single").page
    colour = "document.querySelector('[data-figure=curves]').layout.font.color"
    before = background(page), page.evaluate(colour)
    page.click("#theme")
    turned = background(page), page.evaluate(colour)
    assert before[0] != turned[0]
    assert before[1] != turned[1]
    page.click("#theme")
    assert (background(page), page.evaluate(colour)) == before
    page.emulate_media(color_scheme="dark")  # chosen by hand: the system's change does not count
    assert background(page) == before[0]


def test_the_axis_button_shows_seconds(reports: Reports) -> None:
    page = reports.shared("single").page
    read = "document.querySelector('[data-figure={}]').layout.xaxis.title.text"
    last = "Math.max(...document.querySelector('[data-figure=curves]').data[0].x)"
    assert (page.evaluate(read.format("curves")), page.evaluate(last)) == ("round", 50)
    page.click("button[data-value=seconds]")
    assert page.evaluate(read.format("curves")) == page.evaluate(read.format("losses")) == "seconds"
    assert page.evaluate(last) == 75


def test_the_reference_and_label_buttons_change_the_points(reports: Reports) -> None:
    opened = reports.shared("several")
    page = opened.page
    read = "JSON.stringify(document.querySelector('[data-figure=clients]').data.flatMap(t => t.y))"
    seen = {page.evaluate(read)}
    page.click("#clients button[data-value=local]")
    seen.add(page.evaluate(read))
    assert page.get_attribute("#distribution button[data-value=local]", "aria-pressed") == "true"
    page.click("#clients button[data-choice=label][data-value='2']")
    seen.add(page.evaluate(read))
    assert len(seen) == 3
    assert drawn(page)["clients"] == 40
    assert opened.complaints == []


def test_every_client_can_be_found_and_sorted(reports: Reports) -> None:
    opened = reports.open("single")
    page, names = opened.page, "#matrix tbody td:first-child"
    assert page.locator(names).count() == 40
    assert page.locator(names).first.text_content() == "client 0"
    page.fill("#find", "client 39")
    assert page.locator(names).all_text_contents() == ["client 39"]
    page.fill("#find", "")
    page.click("#matrix th:nth-child(6) button")  # the best personal score first
    scores = [float(x) for x in page.locator("#matrix tbody td:nth-child(6)").all_text_contents()]
    assert scores == sorted(scores, reverse=True)
    with page.expect_download() as download:
        page.click("#download")
    lines = download.value.path().read_text().splitlines()
    assert lines[0].startswith('"client","train","test","alone","global","personal"')
    assert len(lines) == 41
    assert opened.complaints == []
