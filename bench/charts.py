"""Draw the charts of a study as pictures, for a page or a paper: one .svg file for each chart.

A Chromium or Chrome that is installed draws them.

    partita run ffgg-heterogeneity --out runs/ffgg-heterogeneity
    python bench/charts.py runs/ffgg-heterogeneity --out docs/images/ffgg-heterogeneity.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from drawing import picture
from partita.core import check
from partita.engine.store.output import new_page
from partita.recipes.study import read_figures
from partita.report import write_whole
from partita.report.charts import Chart


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the charts of a study's folder and write a picture of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of a study that has finished")
    parser.add_argument(
        "--out", type=Path, required=True, help="a .svg file; more charts go to NAME-2.svg, ..."
    )
    parser.add_argument("--only", type=int, help="the number of a chart, from 1")
    options = parser.parse_args(arguments)
    try:
        for chart, target in _targets(_charts(options.folder, options.only), options.out):
            write_whole(new_page("out", target), picture.of_chart(chart))
            print(f"wrote {target}")
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _charts(folder: Path, only: int | None) -> list[Chart]:
    charts = read_figures(folder)[1]
    if not charts:
        raise check.fail("folder", str(folder), "a study with charts whose runs have all finished")
    if only is None:
        return charts
    return [charts[check.integer("only", only, low=1, high=len(charts)) - 1]]


def _targets(charts: Sequence[Chart], out: Path) -> list[tuple[Chart, Path]]:
    if out.suffix != ".svg":
        raise check.fail("out", str(out), "a .svg file")
    if picture.browser() is None:
        raise check.fail("out", str(out), f"one of {', '.join(picture.BROWSERS)} on the path, which draws it")
    names = [out, *(out.with_name(f"{out.stem}-{i}{out.suffix}") for i in range(2, len(charts) + 1))]
    return list(zip(charts, names))


if __name__ == "__main__":
    main()
