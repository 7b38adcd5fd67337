"""Tables and times: the small parts."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest

from tenure.cli.jobs import print_groups
from tenure.operations.dead import Group
from tenure.terminal import output

NOW = datetime.datetime(2030, 1, 31, tzinfo=datetime.UTC)
YEARS = datetime.timedelta(days=21_946)


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


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """What is printed goes to a terminal of so many columns, without colours."""

    def of(columns: int) -> None:
        monkeypatch.setattr(output, "is_terminal", lambda stream: True)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("NO_COLOR", "1")

    return of


def test_a_table_is_aligned_and_whole_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(["NAME", "JOBS", "NOTE"], [["a", 1200, "x" * 300], ["日本", 7, None]], right=[1])

    assert capsys.readouterr().out.splitlines() == [
        "NAME   JOBS  NOTE",
        f"a     1,200  {'x' * 300}",
        "日本      7",
    ]


def test_a_terminal_gets_the_last_column_cut(
    capsys: pytest.CaptureFixture[str], terminal: Callable[[int], None]
) -> None:
    terminal(40)

    output.table(["A", "B"], [["12345", "語" * 100]])

    line = capsys.readouterr().out.splitlines()[1]
    assert line.endswith("語…")
    assert output.width(line) <= 40


def test_a_cell_cannot_move_the_cursor() -> None:
    assert output.plain("\x1b[2Jgone\nnext\u202e") == "�[2Jgone ⏎ next�"


def test_a_terminal_of_80_columns_gets_ids_that_can_be_told_apart(
    capsys: pytest.CaptureFixture[str], terminal: Callable[[int], None]
) -> None:
    terminal(80)
    ids = ["01M7M368Y92FVA4WDQ5HQVQ3M4", "01M7M368Y92FVBXXXXXXXXXXXX", "01M7M36XXXXXXXXXXXXXXXXXXX"]
    rows = [[id, "x" * 40, "y" * 40, "z" * 40] for id in ids]

    output.table(["ID", "A", "B", "C"], rows, ids=[0], soft=[1, 2])

    lines = capsys.readouterr().out.splitlines()
    assert {output.width(line) for line in lines[1:]} == {80}
    assert [line.split()[0] for line in lines[1:]] == [
        "01M7M368Y92FVA…", "01M7M368Y92FVB…", "01M7M36XXXXXXX…",
    ]  # fmt: skip
    output.table(["ID", "A"], [[ids[0], "x"]], ids=[0])
    assert ids[0] in capsys.readouterr().out, "whole where there is room"


def test_a_terminal_of_80_columns_shows_the_line_that_jobs_died_at(
    capsys: pytest.CaptureFixture[str], terminal: Callable[[int], None]
) -> None:
    terminal(80)
    id = "01M7M368Y92FVA4WDQ5HQVQ3M4"
    places = [("rebuild_index", "NoResultFound at shop/jobs.py:65"), ("nap", "E at jobs.py:7")]
    groups = [
        Group(
            "3f29c1d0", 3, type, "dead_letter", "NoResultFound", place,
            False, NOW - YEARS, NOW - YEARS, id, "no row " * 9,
        )
        for type, place in places
    ]  # fmt: skip

    print_groups(groups, NOW)

    lines = capsys.readouterr().out.splitlines()
    assert max(map(output.width, lines)) <= 80
    assert lines[2].startswith(f"    {id}  shop/jobs.py:65  no row no row")
    assert lines[4].startswith(f"    {id}  E at jobs.py:7  no row no row")
    assert lines[3].split()[2:4] == ["nap", "dead_letter"], "padding is cut without a mark"
