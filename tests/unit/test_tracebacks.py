"""Where an error happened, and what is told of the way to it."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tenure.engine.tracebacks import MOST_BYTES, Tracebacks, fitted
from tenure.engine.tracebacks import _Line as Line

HERE = Path(__file__).name


def task(*args: Any) -> None:
    """Defined where the fallback of a place points to."""


DEFINED = f"{HERE}:{task.__code__.co_firstlineno}"


def tracebacks(handler: Callable[..., Any] = task, hidden: str = "hunter22") -> Tracebacks:
    def scrubbed(said: object) -> str:
        return str(said).replace(hidden, "[redacted]")

    return Tracebacks(
        handler,
        lambda error: f"{type(error).__name__}: {scrubbed(error)}",
        scrubbed,
        lambda source: source.replace("sk_live", "[secret]"),
    )


def raised(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def line(marker: str) -> str:
    """Where the source of this file ends with `# marker`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, text in enumerate(lines, 1) if text.endswith(f"# {marker}")]
    return f"{HERE}:{number}"


def installed(folder: Path, name: str, source: str) -> ModuleType:
    """A module as `pip install` leaves one."""
    file = folder / "lib" / "site-packages" / name.replace(".", "/") / "__init__.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- the place ----------------------------------------------------------------------------------


def test_deep_in_the_standard_library() -> None:
    def read() -> None:
        json.loads("{")  # in json

    error = raised(read)

    assert tracebacks().place(error) == line("in json")
    assert "decoder.py" in str(tracebacks().text(error))


def test_deep_in_a_package_of_somebody_else(tmp_path: Path) -> None:
    client = installed(
        tmp_path, "client", "def get(call):\n    inner(call)\ndef inner(call):\n    call()\n"
    )

    def broken() -> None:
        raise ValueError

    assert tracebacks().place(raised(lambda: client.get(broken))) == line_of(broken, 1)

    library = installed(tmp_path, "library", "def get():\n    raise ValueError\n")
    assert tracebacks().place(raised(lambda: library.get())) == line("by us")  # by us


def line_of(function: Callable[..., Any], after: int) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + after}"


def test_an_app_that_is_installed_is_still_the_users(tmp_path: Path) -> None:
    app = installed(tmp_path, "shop.jobs", "def work():\n    import json\n    json.loads('{')\n")

    assert tracebacks(app.work).place(raised(app.work)) == "__init__.py:3"


def test_another_module_of_the_installed_app(tmp_path: Path) -> None:
    other = installed(tmp_path, "shop.other", "def go():\n    raise ValueError\n")
    app = installed(tmp_path, "shop.jobs", "def work(go):\n\n\n    go()\n")

    assert tracebacks(app.work).place(raised(lambda: app.work(other.go))) == "__init__.py:2"


def test_in_async_code() -> None:
    async def fetch() -> None:
        async with asyncio.timeout(0.001):
            await asyncio.sleep(5)  # waited here

    async def work() -> None:
        await fetch()  # asked here

    error = raised(lambda: asyncio.run(work()))

    assert isinstance(error, TimeoutError)
    assert tracebacks().place(error).startswith(HERE)
    assert "waited here" in str(tracebacks().text(error)), "the cause is told as well"


@pytest.mark.parametrize("same", [True, False])
def test_in_an_exception_group(same: bool) -> None:
    async def first() -> None:
        raise ValueError("one")  # first leaf

    async def second() -> None:
        raise ValueError("two")

    async def work() -> None:
        async with asyncio.TaskGroup() as group:  # the group
            group.create_task(first())
            group.create_task(first() if same else second())

    error = raised(lambda: asyncio.run(work()))

    assert isinstance(error, ExceptionGroup)
    assert tracebacks().place(error) == line("first leaf" if same else "the group")
    text = str(tracebacks().text(error))
    assert text.startswith("  + Exception Group Traceback (most recent call last):\n  |   File ")
    assert text.count("    | ValueError: ") == 2
    assert "+-+---------------- 1 ----------------\n    | Traceback (most recent" in text
    assert text.endswith("\n    +------------------------------------")


def test_raised_from_another() -> None:
    def work() -> None:
        try:
            json.loads("{")
        except ValueError as error:
            raise RuntimeError("no such order") from error  # raised from

    error = raised(work)
    first, _, second = str(tracebacks().text(error)).partition(
        "\n\nThe above exception was the direct cause of the following exception:\n\n"
    )

    assert tracebacks().place(error) == line("raised from")
    assert "JSONDecodeError: Expecting" in first
    assert second.endswith("# raised from\nRuntimeError: no such order")


def test_what_happened_meanwhile_and_what_is_to_be_forgotten() -> None:
    def work(hide: bool) -> None:
        try:
            raise KeyError("first")
        except KeyError:
            if hide:
                raise ValueError("second") from None
            raise ValueError("second")  # noqa: B904

    told = str(tracebacks().text(raised(lambda: work(False))))
    assert "During handling of the above exception, another exception occurred:" in told
    assert "\nKeyError: " in told
    assert "\nKeyError: " not in str(tracebacks().text(raised(lambda: work(True))))


def test_without_a_frame_of_the_users_it_is_where_the_task_is_defined() -> None:
    @functools.lru_cache
    @functools.wraps(
        task,
        assigned=(),
    )
    def decorated() -> None: ...  # defined here

    error = raised(functools.partial(json.loads, "{"))
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next

    assert tracebacks().place(error) == DEFINED
    assert tracebacks().place(ValueError("never raised")) == DEFINED
    assert tracebacks().text(ValueError("never raised")) is None
    del decorated.__wrapped__.__wrapped__  # type: ignore[attr-defined]
    assert tracebacks(decorated).place(ValueError()) == line("defined here")


def test_a_handler_that_is_no_function() -> None:
    class Handler:
        def __call__(self) -> None: ...

    assert tracebacks(Handler()).place(ValueError()) == ""


# -- the text -----------------------------------------------------------------------------------


def test_it_looks_like_pythons() -> None:
    import traceback

    def work() -> None:
        raise ValueError("no such order")

    error = raised(work)

    expected = [s for s in traceback.format_exception(error) if "^^^" not in s]
    told = str(tracebacks().text(error)).splitlines()
    assert told == [s for s in "".join(expected).splitlines() if "^^^" not in s]


def test_locals_and_hidden_words_are_not_told() -> None:
    def work(password: str) -> None:
        kept = password * 2
        error = ValueError(f"not {password}")
        error.add_note(f"nor {password} {len(kept)}")
        raise error

    text = str(tracebacks().text(raised(lambda: work("hunter22"))))  # sk_live

    assert text.endswith("ValueError: not [redacted]\nnor [redacted] 16")
    assert "hunter22" not in text.replace('work("hunter22")', "")
    assert "# [secret]" in text, "a secret in the source"


def test_a_file_that_somebody_only_names_is_not_read(tmp_path: Path) -> None:
    private = tmp_path / "hunter22.txt"
    private.write_text("the private line\n")
    code = compile("raise ValueError", str(private), "exec")

    text = str(tracebacks().text(raised(lambda: exec(code))))

    assert "the private line" not in text
    assert "hunter22" not in text
    assert f"{tmp_path}/[redacted].txt" in text
    assert tracebacks().place(raised(lambda: exec(code))) == "[redacted].txt:1"


def test_control_characters_are_shown() -> None:
    def work() -> None:
        raise ValueError("a\x1b[2J\x07\u202e\u2028b\nsecond line")

    text = str(tracebacks().text(raised(work)))

    assert text.endswith("ValueError: a\\x1b[2J\\x07\\u202e\\u2028b\nsecond line")


def test_recursion() -> None:
    def once_more(n: int) -> None:
        once_more(n + 1)

    def ping(n: int) -> None:
        pong(n)

    def pong(n: int) -> None:
        ping(n)

    text = str(tracebacks().text(raised(lambda: once_more(0))))
    assert text.count("in once_more") == 3
    assert "more times]" in text
    assert tracebacks().place(raised(lambda: once_more(0))) == line_of(once_more, 1)

    text = str(tracebacks().text(raised(lambda: ping(0))))
    assert re.search(r"^  \.\.\.( \d+ frames \.\.\.)?$", text, re.M)  # longer paths: cut again
    assert len(text.encode()) <= MOST_BYTES


def test_errors_that_cause_each_other_end() -> None:
    first, second = raised(lambda: json.loads("{")), raised(lambda: json.loads("["))
    first.__cause__, second.__cause__ = second, first

    assert str(tracebacks().text(first)).count("\nJSONDecodeError: ") == 2


def test_a_long_chain_and_a_large_group_are_bounded() -> None:
    error = raised(lambda: json.loads("{"))
    for number in range(100):
        after = ValueError(f"number {number}")
        after.__cause__, error = error, after
    assert len(str(tracebacks().text(error)).encode()) <= MOST_BYTES

    leaves = [raised(lambda: json.loads("{")) for _ in range(200)]
    text = str(tracebacks().text(ExceptionGroup("many", leaves)))  # type: ignore[type-var]
    assert "more" in text
    assert len(text.encode()) <= MOST_BYTES


def test_many_notes_are_counted() -> None:
    """Each that is shown is scrubbed: a hundred thousand would take longer than the job may."""
    error = raised(lambda: json.loads("{"))
    for number in range(100_000):
        error.add_note(f"note {number}")

    text = str(tracebacks().text(error))

    assert "note 0\n" in text and text.endswith("... and 99980 more notes")
    assert "note 20\n" not in text


# -- cutting ------------------------------------------------------------------------------------


def test_frames_of_libraries_go_first() -> None:
    theirs = Line("  File library\n    " + "x" * 300, True, True)
    ours = [Line(f"  File ours {n}", True) for n in range(3)]
    lines = [Line("Traceback"), ours[0], *[theirs] * 40, ours[1], *[theirs] * 40, ours[2]]

    assert fitted([*lines, Line("ValueError: no")]) == (
        "Traceback\n  File ours 0\n  ... 40 frames of libraries ...\n  File ours 1\n"
        "  ... 40 frames of libraries ...\n  File ours 2\nValueError: no"
    )


def test_then_the_middle_goes() -> None:
    lines = [Line(f"  File ours {n:04} é", True) for n in range(1000)]
    text = fitted([*lines, Line("ValueError: no")])

    assert MOST_BYTES * 0.9 < len(text.encode()) <= MOST_BYTES
    assert text.startswith("  File ours 0000 é\n  File ours 0001 é\n")
    assert text.endswith("  File ours 0999 é\nValueError: no")
    assert text.count("\n  ...\n") == 1
    assert all(part.startswith("  File ours") for part in text.splitlines()[:50])


@pytest.mark.parametrize("letter", ["x", "é", "\U0001f511", "\x1b"])
def test_a_single_endless_line(letter: str) -> None:
    text = fitted([Line("start " + letter * 100_000 + " end")])

    assert len(text.encode()) <= MOST_BYTES
    assert text.startswith("start ")
    assert text.endswith(" end")


def test_this_file_is_not_the_standard_library() -> None:
    assert "site-packages" not in __file__
    assert not __file__.startswith(sys.base_prefix + "/lib")
