"""`tenure worker` on a terminal: a live line that is right, and nothing that tears it."""

from __future__ import annotations

import re
import signal

import pytest

from .conftest import Cli, Stage
from .terminal import CTRL_C, Screen, on_a_terminal

PRINTS = """
import ctypes
import logging
import os
import sys
import threading
import time

import tenure

app = tenure.App("sqlite:///jobs.db")


@app.task
def prints(n: int) -> None:
    for row in range(40):
        print(f"out {n} {row}\\n", end="")  # in one go: two of them run at once
        print(f"err {n} {row}\\n", end="", file=sys.stderr)
        time.sleep(0.01)


@app.task
def threads() -> None:
    def run(n: int) -> None:
        for row in range(40):
            os.write(1, f"thread {n} {row}\\n".encode())
            time.sleep(0.01)

    started = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


@app.task
def c_code() -> None:
    libc = ctypes.CDLL(None)
    for row in range(20):
        libc.printf(b"c %d\\n", row)  # flushed by the C library, if it thinks of a terminal
        time.sleep(0.01)


@app.task
def without_newline() -> None:
    print("begun", end="", flush=True)
    time.sleep(1.2)
    print("ended")


@app.task
def bars() -> None:
    for part in range(20):
        print(f"\\r\\x1b[2K\\x1b[1A{part} of 20", end="", flush=True)
        time.sleep(0.05)
    print("\\r\\x1b[31mall of it\\x1b[0m")
    logging.getLogger("mine").warning("a line of my own log")


@app.task
def crashes() -> None:
    os.write(2, b"last words")
    os._exit(3)


@app.task
def whom() -> None:
    print("is a terminal:", sys.stdout.isatty(), os.get_terminal_size().columns)
"""
LIVE = re.compile(r"[\d,]+ done · ")


def at_work(tenure: Cli) -> Cli:
    (tenure.home / "loud.py").write_text(PRINTS, "utf-8")
    return tenure


def test_what_handlers_print_never_tears_the_live_line(tenure: Cli) -> None:
    at_work(tenure)
    for job, payload in (("prints", '{"n": 0}'), ("prints", '{"n": 1}'), ("threads", "{}")):
        assert tenure("-A", "loud", "enqueue", job, payload).code == 0
    assert tenure("-A", "loud", "enqueue", "c_code").code == 0

    with on_a_terminal(tenure, "-A", "loud", "worker", "--drain") as terminal:
        assert terminal.end() == 0

    screen = Screen().feed(terminal.seen)
    wanted = [f"{to} {n} {row}" for to in ("out", "err") for n in (0, 1) for row in range(40)]
    wanted += [f"thread {n} {row}" for n in range(3) for row in range(40)]
    wanted += [f"c {row}" for row in range(20)]
    found = [row for row in screen.left if re.match("(out|err|thread|c) ", row)]
    assert sorted(found) == sorted(wanted)
    assert [row for row in screen.left if LIVE.search(row)] == [], "it was left behind"
    assert len(LIVE.findall(terminal.seen)) >= 3, "there was one all the time"
    assert screen.rows[-1] == ""


def test_lines_that_do_not_end_and_lines_that_are_written_over(tenure: Cli) -> None:
    at_work(tenure)
    for job in ("without_newline", "bars", "whom"):
        assert tenure("-A", "loud", "enqueue", job).code == 0

    with on_a_terminal(tenure, "-A", "loud", "worker", "--drain", "-c", "1") as terminal:
        assert terminal.end() == 0

    shown = Screen().feed(terminal.seen).left  # which knows no sequence that moves the cursor up
    assert [row for row in shown if LIVE.search(row)] == []
    assert shown[1:3] == ["begun", "ended"]  # after "started: "
    assert "all of it" in shown
    assert "\x1b[31mall of it\x1b[0m" in terminal.seen
    assert any(row.endswith("WARNING a line of my own log") for row in shown)
    assert "is a terminal: True 120" in shown


def test_last_words_of_a_process_that_ends(tenure: Cli) -> None:
    at_work(tenure)
    assert tenure("-A", "loud", "enqueue", "crashes").code == 0

    with on_a_terminal(tenure, "-A", "loud", "worker", "--drain") as terminal:
        assert terminal.end() == 0

    assert "last words" in Screen().feed(terminal.seen).left


@pytest.mark.timed
def test_the_live_line_is_right_from_the_first_second(stage: Stage) -> None:
    tenure = stage.tenure
    for _ in range(3):
        tenure.shop("enqueue", "nap", '{"seconds": 2.2}')

    with on_a_terminal(tenure, "-A", "shop", "worker", "--drain", "-c", "2") as terminal:
        assert terminal.end() == 0

    lines = re.findall(r"\r\x1b\[K([^\r\x1b]*done[^\r\x1b]*)", terminal.seen)
    figure = re.compile(r"(\d+) (?:done|queued|running)")
    figures = [tuple(map(int, figure.findall(line))) for line in lines]
    # One job that takes no time and three that take 2.2 s, two at once. All four are somewhere
    # whenever one looks (the first look may see one start), and of what an earlier worker has done
    # none is ours.
    assert sum(figures[0]) >= 4 and {sum(found) for found in figures[1:]} == {4}, lines
    assert {(1, 1, 2), (3, 0, 1)} <= set(figures), lines
    assert all(line.endswith(" · 2 later · 2 dead") for line in lines)
    assert "jobs/s" not in lines[0]
    rates = [float(found) for found in re.findall(r"([\d.]+) jobs/s", "\n".join(lines))]
    assert rates, lines
    assert min(rates) > 0 and max(rates) < 1.5, lines
    assert "\r\x1b[K4 completed in " in terminal.seen  # the line has gone


def test_only_the_queues_it_serves_are_counted(stage: Stage) -> None:
    tenure = stage.tenure
    tenure.shop("enqueue", "nap", '{"seconds": 0.7}', "--queue", "slow")

    with on_a_terminal(tenure, "-A", "shop", "worker", "--drain", "-Q", "slow") as terminal:
        assert terminal.end() == 0

    assert "\r\x1b[K0 done · 0 queued · 1 running" in terminal.seen
    assert "later" not in terminal.seen.partition("completed")[0]


def test_without_a_terminal_nothing_of_it_appears(tenure: Cli) -> None:
    at_work(tenure)
    tenure("-A", "loud", "enqueue", "prints", '{"n": 1}')

    ran = tenure("-A", "loud", "worker", "--drain", TERM="xterm")

    assert "done ·" not in ran.out + ran.err and "\x1b" not in ran.out + ran.err
    assert [f"out 1 {row}" for row in range(40)] == ran.out.splitlines()[:40]


def test_ctrl_c_says_what_runs_and_for_how_long(tenure: Cli) -> None:
    for _ in range(3):
        tenure.shop("enqueue", "nap", '{"seconds": 2}')
    with on_a_terminal(tenure, "-A", "shop", "worker", "-c", "2") as terminal:
        terminal.read(until="2 running")
        terminal.type(CTRL_C)
        assert terminal.end() == 0

    shown = Screen().feed(terminal.seen).left
    said = [row.partition("INFO    ")[2] for row in shown if "stopping" in row]
    assert said == ["stopping: 2 running, up to 30 s; Ctrl-C again ends now"]
    assert any(row.startswith("2 completed in ") for row in shown)
    assert [row for row in shown if LIVE.search(row)] == []


def test_a_second_ctrl_c_ends_now(tenure: Cli) -> None:
    tenure.shop("enqueue", "nap", '{"seconds": 60}')
    with on_a_terminal(tenure, "-A", "shop", "worker", "--shutdown-timeout", "90.5") as terminal:
        terminal.read(until="1 running")
        terminal.type(CTRL_C)
        terminal.read(until="stopping: 1 running, up to 90.5 s; Ctrl-C again ends now")
        terminal.type(CTRL_C)
        assert terminal.end() == 0
    assert terminal.seen.count("stopping") == 1
    assert "1 released in " in terminal.seen


def test_sigterm_says_the_same_and_nothing_may_run(tenure: Cli) -> None:
    with on_a_terminal(tenure, "-A", "shop", "worker") as terminal:
        terminal.read(until="0 running")
        terminal.program.send_signal(signal.SIGTERM)
        assert terminal.end() == 0
    assert "stopping: nothing running\r\n" in terminal.seen


def test_a_terminal_sees_colours_unless_told_otherwise(stage: Stage) -> None:
    with on_a_terminal(stage.tenure, "-A", "shop", "jobs") as terminal:
        assert "\x1b[31mfailed\x1b[0m" in terminal.read()
    with on_a_terminal(stage.tenure, "-A", "shop", "jobs", NO_COLOR="1") as terminal:
        assert "\x1b[" not in terminal.read()
