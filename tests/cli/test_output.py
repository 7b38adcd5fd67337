"""Tables, times, quantiles: the small parts."""

from __future__ import annotations

import datetime
import math

import pytest

from tenure.cli import output
from tenure.cli.stats import BOUNDS, quantile

NOW = datetime.datetime(2030, 1, 31, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "40 ms"), (0.9999, "1 s"), (3.24, "3.2 s"), (12, "12 s"), (240, "4 min"),
        (7200, "2 h"), (5 * 86_400, "5 days"), (2000 * 86_400, "2,000 days"),
    ],
)  # fmt: skip
def test_span(seconds: float, text: str) -> None:
    assert output.span(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-0.4, "just now"), (0.4, "in 1 s"), (-180, "3 min ago"), (240, "in 4 min")],
)
def test_relative(seconds: float, text: str) -> None:
    assert output.relative(NOW + datetime.timedelta(seconds=seconds), NOW) == text


def test_a_table_is_aligned_and_whole_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(["NAME", "JOBS", "NOTE"], [["a", 1200, "x" * 300], ["日本", 7, None]], right=[1])

    assert capsys.readouterr().out.splitlines() == [
        "NAME   JOBS  NOTE",
        f"a     1,200  {'x' * 300}",
        "日本      7",
    ]


def test_a_terminal_gets_the_last_column_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")

    output.table(["A", "B"], [["12345", "語" * 100]])

    line = capsys.readouterr().out.splitlines()[1]
    assert line.endswith("語…")
    assert output.width(line) <= 40


def test_a_cell_cannot_move_the_cursor() -> None:
    assert output.plain("\x1b[2Jgone\nnext\u202e") == "�[2Jgone ⏎ next�"


def test_quantiles_interpolate_within_a_bucket() -> None:
    buckets = [0] * (len(BOUNDS) + 1)
    assert quantile(buckets, 0.5) is None

    buckets[4] = 100  # 0.05 to 0.1 s
    assert quantile(buckets, 0.5) == pytest.approx(0.075)
    assert quantile(buckets, 1.0) == pytest.approx(0.1)

    buckets[12] = 100  # longer than the last bound
    assert quantile(buckets, 0.99) == math.inf
