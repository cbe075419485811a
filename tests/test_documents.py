"""Check that everything the documents show works: Python blocks, commands, examples, links and the site."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import io
import itertools
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
import torch
from torch.func import vmap
from typer.main import get_command

import partita as pt
from partita.algorithms import METHODS
from partita.algorithms.known import KNOWN
from partita.cli import app, catalogue
from partita.core.options import signature
from partita.recipes import RECIPES, find
from partita.recipes.experiment import build
from partita.recipes.expressions import parse
from support import each

pytestmark = pytest.mark.usefixtures("brief_baselines")

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


class Block(NamedTuple):
    """A fenced block of a page and the line it begins in."""

    page: Path
    line: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text()
    fences = re.finditer(rf"^```(?:{'|'.join(languages)})\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(page, text.count("\n", 0, fence.start(1)) + 1, fence[1]) for fence in fences]


# ---- Python blocks


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a temporary folder, and restore the registries of methods and recipes afterwards."""
    monkeypatch.chdir(tmp_path)
    methods, recipes = dict(METHODS), dict(RECIPES)
    yield
    for registry, before in ((METHODS, methods), (RECIPES, recipes)):
        registry.clear()
        registry.update(before)


def shorter(page: Path, text: str) -> str:
    """Reduce dozens of rounds to a few, except on pages whose assertions depend on their number."""
    if page.name in ("adversaries.md", "time.md"):
        return text
    enough = 40 if page.name == "README.md" else 5
    return re.sub(r'(\brounds(?:=|": ))\d\d\b', rf"\g<1>{enough}", text)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem == "workers"))
        for p in PAGES
        if blocks(p, "python")
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_the_blocks_of_a_page_run_in_order(page: Path, request: pytest.FixtureRequest) -> None:
    if page.name == "README.md":
        request.getfixturevalue("longer_baselines")
    if "pt.track.TensorBoard" in page.read_text() and importlib.util.find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed")
    if "pt.tune(" in page.read_text() and importlib.util.find_spec("optuna") is None:
        pytest.skip("optuna is not installed")
    names: dict[str, Any] = {"__name__": "document"}
    for block in blocks(page, "python"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # recommended code must not cause warnings
            text = "\n" * (block.line - 1) + shorter(page, block.text)
            exec(
                compile(text, str(page), "exec", dont_inherit=True), names
            )  # without the imports of this file
        if isinstance(names.get("run"), pt.Run):
            score = names["run"].summary()["test"]["personal"]
            assert math.isfinite(score), block.name
    if page.name == "README.md":
        test = names["run"].summary()["test"]
        assert test["personal"] > max(test["local"], test["global"])


def test_the_penalty_of_the_documents_has_its_own_aggregator() -> None:
    """At the w̃ that Ψ charges least its gradient, −Σ_k [x_k − prox(x_k)] for x_k = w_k − w̃, is zero."""
    (block,) = (b for b in blocks(DOCS / "extending.md", "python") if "Penalty(" in b.text)
    kept = [x for x in ast.parse(block.text).body if isinstance(x, ast.ImportFrom | ast.FunctionDef)]
    names: dict[str, Any] = {"pt": pt}
    exec(compile(ast.Module(kept, []), block.name, "exec"), names)
    psi = names[next(x.name for x in kept if isinstance(x, ast.FunctionDef))]()
    models = {"a": torch.randn(5, 2, 3, dtype=torch.float64), "b": torch.randn(5, 4, dtype=torch.float64)}
    center = psi.aggregator.combine(models, torch.ones(5).double(), torch.tensor(0)).delta
    apart = {name: x - center[name] for name, x in models.items()}
    rest = {name: x - vmap(psi.prox)(apart)[name] for name, x in apart.items()}
    assert max(x.abs().max() for x in rest.values()) > 0.1
    assert max(x.sum(0).abs().max() for x in rest.values()) < 1e-12


@pytest.mark.usefixtures("elsewhere")
def test_fedrep_of_the_documents_is_fedalt() -> None:
    """FedRep written from scratch ends with the same weights as `fedalt`."""
    (block,) = (b for b in blocks(DOCS / "extending.md", "python") if "def fedrep(" in b.text)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(block.text, block.name, "exec"), names)
    assert block.text.count("import partita") == 1
    for executor in ("loop", "vmap"):
        settings = {"rounds": 5, "steps": 10, "batch": 16, "baselines": False, "executor": executor}
        model = pt.models.mlp(64, 16, 10)
        one = pt.federate(model, names["data"], names["fedrep"]("output", lr=0.3), **settings)
        other = pt.federate(model, names["data"], pt.fedalt("output", lr=0.3, personal_steps=5), **settings)
        for name, x in one.shared.items():
            torch.testing.assert_close(x, other.shared[name])


@pytest.mark.parametrize("name", KNOWN)
def test_methods_by_other_names_run(name: str) -> None:
    known = KNOWN[name]
    data = pt.data.digits(clients=6, partition=pt.data.label_skew(classes=3), test=0.4, seed=0)
    method, settings = eval(known.expression, {"pt": pt}), eval(f"dict({known.settings})", {"pt": pt})
    model = pt.models.mlp(64, 16, 8, 10)
    model = eval(known.model, {"pt": pt, "model": model}) if known.model else model
    if name == "FedBN":
        model = torch.nn.Sequential(*model, torch.nn.BatchNorm1d(10))
    run = pt.federate(model, data, method, rounds=2, steps=2, batch=8, baselines=False, **settings)
    assert run.summary()["test"]["personal"] is not None
    assert f"| {name} | {known.paper} | `{known.expression}`" in (DOCS / "methods" / "index.md").read_text()


# ---- commands


def commands() -> list[Block]:
    """Return every line of a shell block that calls `partita`, up to a pipe or a comment."""
    lines = []
    for page in PAGES:
        for block in blocks(page, "sh", "console", "bash"):
            for i, line in enumerate(block.text.splitlines()):
                line = line.removeprefix("$ ").strip()
                if line.startswith("partita "):
                    lines.append(Block(page, block.line + i, line.partition(" | ")[0]))
    return lines


@each("command", [pytest.param(c, id=f"{c.name} {c.text}") for c in commands()])
def test_a_command_and_its_settings_are_there(command: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """Parse a command without running it: its options, the settings of its recipe and its names exist."""
    arguments = shlex.split(command.text, comments=True)[1:]
    group: Any = get_command(app)
    if arguments == ["--install-completion"]:
        assert any(arguments[0] in option.opts for option in group.params)
        return
    context = group.make_context("partita", list(arguments))
    name, chosen, rest = group.resolve_command(context, arguments)
    options = chosen.make_context(name, rest, parent=context).params  # refuses unknown options, wrong types
    if name in ("run", "compare", "tune", "split"):
        check_experiment(options)
    elif name == "list":
        assert catalogue.entries(options["kind"])
    elif name == "show":
        assert catalogue.facts(options["name"])
    assert capsys.readouterr().err == ""


STORED = (
    "partial-",
    "persafl-",
    "ffgg-real",
    "fedplus-mnist",
    "fedplus-stragglers",
    "byzantine",
    "bytes-",
    "lora",
    "embracing-",
)


@functools.cache
def builds(name: str, assignments: tuple[str, ...]) -> bool:
    """Return whether the recipe takes the settings (cached: several pages show the same command)."""
    recipe = find(str(EXAMPLES / Path(name).name) if name.endswith(".py") else name)
    settings = parse(list(assignments))
    if name.startswith(STORED):  # needs data that may not be here
        return set(settings) <= set(signature(recipe).parameters)
    return bool(build(recipe, settings))


def check_experiment(options: dict[str, Any]) -> None:
    assert builds(options["recipe"], tuple(options["set_"] or ()))
    for method in re.findall(r"(\w+)(?:\([^)]*\))?", options.get("algorithms") or ""):
        assert method in METHODS


# ---- examples


@pytest.mark.usefixtures("longer_baselines")
def test_own_model_in_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    script = EXAMPLES / "own_model.py"
    lines = [
        x for x in script.read_text().splitlines() if x and not x.startswith(('"""', "import", "from", "#"))
    ]
    assert len(lines) <= 10
    exec(compile(re.sub(r"rounds=\d+", "rounds=50", script.read_text()), str(script), "exec"), {})  # a third
    table = capsys.readouterr().out.splitlines()
    scores = {
        line.split()[0]: float(line.split()[-1]) for line in table if re.search(r" accuracy [\d.]+$", line)
    }
    assert scores["personal"] > max(scores["each"], scores["one"])


def test_own_experiment_runs() -> None:
    experiment = build(find(str(EXAMPLES / "my_experiment.py")), {"rounds": 2, "clients": 8, "cohort": 4})
    assert len(experiment.run(baselines=False).metrics) == 2


STORIES = {
    "heart_disease": {"ROUNDS": "2", "SEEDS": "2"},
    "shakespeare": {"ROUNDS": "1", "ROLES": "2"},
}
# every role alone until it has converged takes most of a minute
slow = {"shakespeare": pytest.mark.slow}
story = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[slow[name]] if name in slow else []) for name in STORIES]
)


@story
@pytest.mark.usefixtures("elsewhere")
def test_a_story_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if not (Path(os.environ.get("PARTITA_DATA") or ".") / f"{name}.npz").is_file():
        pytest.skip(f"PARTITA_DATA has no {name}.npz")
    for variable, value in STORIES[name].items():
        monkeypatch.setenv(variable, value)
    runpy.run_path(str(EXAMPLES / f"{name}.py"))
    said = capsys.readouterr().out
    for words in ("personal models", "each alone", f"{name}.html"):
        assert words in said
    assert (tmp_path / "runs" / f"{name}.html").stat().st_size > 10_000


@pytest.mark.usefixtures("elsewhere")
def test_fine_tuning_with_lora_runs_without_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("PARTITA_DATA", raising=False)
    short = "--rounds 2 --pretrain 2 --authors 2 --length 32 --rank 2 --method fedsa"
    monkeypatch.setattr("sys.argv", ["lora.py", *short.split()])
    names = runpy.run_path(str(EXAMPLES / "lora.py"))
    said = capsys.readouterr().out
    assert re.search(r"perplexity +before +shared +fedsa", said)
    for client, score in enumerate(names["run"].scores("personal")):
        plain = names["perplexity"](names["run"].client(client).model(), client)
        assert score == pytest.approx(plain, rel=1e-4)
        assert score < names["start"][client]
    assert (tmp_path / "runs" / "lora" / "report.html").stat().st_size > 10_000


@story
def test_a_story_without_data_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARTITA_DATA", raising=False)
    with pytest.raises(SystemExit, match=r"^Set PARTITA_DATA .*\.npz.*\.$"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"))


@story
def test_a_story_is_made_of_cells(name: str) -> None:
    cells = re.split(r"^# %%", (EXAMPLES / f"{name}.py").read_text(), flags=re.MULTILINE)
    told = [cell for cell in cells if cell.startswith(" [markdown]")]
    assert len(told) >= 5
    for cell in told:
        assert all(line.startswith("#") for line in cell.splitlines()[1:] if line)


# ---- what pages name


def test_every_file_that_a_page_names_exists() -> None:
    package = ROOT / "src" / "partita"
    places = [
        ROOT,
        package,
        *(p for p in package.iterdir() if p.is_dir()),
    ]  # `disk.py` after `store/memory.py`
    for page in PAGES:
        named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", page.read_text())
        missing = [n for n in named if not any((place / n).exists() for place in places)]
        assert not missing, page


def test_every_method_has_its_place() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "methods").glob("*.md"))
    assert [name for name in METHODS if f"`{name}`" not in text] == []


def test_the_links_of_the_readme_resolve() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


# ---- the site


class Links(HTMLParser):
    """The links of a page, the resources that it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.refers, self.loads, self.places = list[str](), list[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.places |= {value for key in ("id", "name") if (value := attributes.get(key))}
        target = attributes.get("src") or attributes.get("href")
        if target and tag in ("script", "link", "img", "iframe", "source", "video", "audio"):
            self.loads.append(target)
        elif target and tag == "a":
            self.refers.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Links]:
    """Build the site and return the links of its pages by file."""
    for needed in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install -c constraints.txt -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return {page: Links(page.read_text()) for page in sorted(folder.rglob("*.html")) if page.stem != "404"}


def test_every_page_is_built(site: dict[Path, Links]) -> None:
    built = {page.stem for page in site}
    assert {page.stem for page in DOCS.rglob("*.md")} <= built
    assert not list(next(iter(site)).parent.rglob("*.py"))


def test_the_reference_has_every_public_name(site: dict[Path, Links]) -> None:
    (page,) = (links for path, links in site.items() if path.name == "api.html")
    modules = [pt, *(m for m in map(vars(pt).get, pt.__all__) if inspect.ismodule(m))]
    public = [getattr(m, name) for m in modules for name in getattr(m, "__all__", ())]
    places = {
        f"{inspect.unwrap(x).__module__}.{x.__qualname__}"
        for x in public
        if inspect.isfunction(x) or inspect.isclass(x)
    }
    assert len(places) > 80
    assert sorted(places - page.places) == []


def test_links_resolve(site: dict[Path, Links]) -> None:
    broken = []
    for page, links in site.items():
        for link in (*links.refers, *links.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("/"):
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            resolves = target.is_file()
            if resolves and parts.fragment and target in site:
                resolves = unquote(parts.fragment) in site[target].places
            if not resolves:
                broken.append(f"{page.name}: {link}")
    assert broken == []


def test_pages_load_nothing_from_outside(site: dict[Path, Links]) -> None:
    outside = re.compile(r"(https?:)?//")
    assert [(page.name, x) for page, links in site.items() for x in links.loads if outside.match(x)] == []
    for sheet in next(iter(site)).parent.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text()), sheet.name


def test_equations_are_rendered(site: dict[Path, Links]) -> None:
    for page in site:
        text = page.read_text()
        assert "$$" not in re.sub(r"<(pre|code|script)\b.*?</\1>", "", text, flags=re.DOTALL), page.name
        if page.parent.name == "methods":
            assert "<math" in text, page.name


def pieces(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the heading and the paragraphs of each section, cut before its commands.

    The paragraph that leads to a command begins the piece, unless it is a table or a heading.
    """
    for section in re.split(r"^#{2,} ", page, flags=re.MULTILINE)[1:]:
        heading, *paragraphs = section.split("\n\n")
        starts = [i for i, text in enumerate(paragraphs) if text.startswith("```sh\n")]
        starts = [i - (i > 0 and not paragraphs[i - 1].startswith(("|", "```"))) for i in starts]
        cuts = [0, *starts, len(paragraphs)]
        for start, end in itertools.pairwise(cuts):
            if start < end:
                yield heading, paragraphs[start:end]


def unsaid(page: str) -> list[str]:
    """Return the headings where a table has no commit beside it, or a command no executor.

    Beside it: in a paragraph between its command and the table, or in the one that follows the table.
    """
    commit = re.compile(r"\b(at|by|commit) [0-9a-f]{7}\b", re.IGNORECASE)
    executor = re.compile(r"--executor|`auto`|no executor|nothing is trained", re.IGNORECASE)
    found = []
    for heading, paragraphs in pieces(page):
        for i, text in enumerate(paragraphs):
            if "\n| --- " in text and not commit.search("\n".join(paragraphs[: i + 2])):
                found.append(f"{heading}: a table without a commit")
        commands = [text for text in paragraphs if text.startswith("```sh\n") and "partita run" in text]
        if commands and not executor.search("\n".join(paragraphs)):
            found.append(f"{heading}: a command without an executor")
    return found


def test_the_results_say_of_each_table_the_commit_and_of_each_command_the_executor() -> None:
    page = (DOCS / "results.md").read_text()
    assert unsaid(page) == []
    assert "to be measured" not in page.lower()


TABLE = "| a |\n| --- |\n| 1 |"
RUN = "```sh\npartita run x --executor loop\n```"


@each(
    "section, wrong",
    [
        (f"{RUN}\n\nAt 1234567.\n\n{TABLE}", 0),
        (f"{RUN}\n\n{TABLE}\n\nBy 1234567.", 0),
        (f"{RUN}\n\n{TABLE}\n\nSo it is.\n\nMeasured at 1234567.", 1),  # too far away
        (f"{RUN}\n\nAt 1234567.\n\n{TABLE}\n\n{RUN}\n\n{TABLE}", 1),  # of another command
        (f"{RUN}\n\nAt 1234567.\n\n{TABLE}\n\n#### Below\n\n{TABLE}", 1),  # of another section
        (f"By 1234567:\n\n{RUN}\n\n{TABLE}", 0),
        ("```sh\npartita run x\n```", 1),
        ("With `auto`:\n\n```sh\npartita run x\n```", 0),
        (f"{RUN}\n\nAnd then\n\n```sh\npartita run x\n```", 1),
    ],
)
def test_results_that_do_not_say_it_are_found(section: str, wrong: int) -> None:
    assert len(unsaid(f"# Results\n\nAll at 7654321.\n\n## One\n\n{section}\n")) == wrong


def test_no_page_has_a_placeholder_left() -> None:
    left = [
        (page.name, line)
        for page in PAGES
        for line in page.read_text().splitlines()
        if re.fullmatch(r"[A-Z_]{6,}", line)
    ]
    assert not left
