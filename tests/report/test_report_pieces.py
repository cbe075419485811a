"""Numbers for people, and markup."""

from __future__ import annotations

from partita.engine import verdict
from partita.report.html import table, tag
from partita.report.words import (
    bytes_,
    count,
    score,
    seconds,
    signed,
    spread,
)
from support import each


@each(
    ("made", "expected"),
    [
        (score(0.96244), "0.9624"),
        (score(12345.678), "12,345.7"),
        (score(0.0000123), "1.23e-05"),
        (score(None), "–"),
        (signed(-0.05), "−0.0500"),
        (signed(0.0), "0.0000"),
        (count(18.5), "18.5"),
        (count(1234.0), "1,234"),
        (bytes_(999), "999 B"),
        (bytes_(2.31e7), "23.1 MB"),
        (seconds(245.2), "4 min 05 s"),
        (seconds(12000), "3 h 20 min"),
        (spread({"mean": 0.5, "std": 0.00012}, 2), "0.5000 ± 0.0001"),
        (spread({"mean": 0.5, "std": 0.0}, 1), "0.5000"),
    ],
)
def test_numbers_as_people_read_them(made: str, expected: str) -> None:
    assert made == expected


def test_markup_escapes_all_but_markup() -> None:
    assert tag("p", "<", tag("b", "&"), class_='"') == '<p class="&quot;">&lt;<b>&amp;</b></p>'
    assert "&lt;x&gt;" in table(["<x>"], [["<x>"]])


def test_a_sentence_names_a_few_of_many() -> None:
    """A study of sixty variants has a title that can be read."""
    names = [f"variant-{i}" for i in range(61)]
    assert verdict.listed(names[:1]) == "variant-0"
    assert verdict.listed(names[:3]) == "variant-0, variant-1 and variant-2"
    assert verdict.listed(names[:8]).endswith("variant-6 and variant-7")
    assert verdict.listed(names).endswith("variant-6 and 54 others")
