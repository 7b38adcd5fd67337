"""Declaring a task: what is refused, with the reason, where it is written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import tenure
from tenure import policy


@pytest.fixture
def app() -> tenure.App:
    return tenure.App("sqlite:///never-made.db")


class Mailer:
    def send(self, to: str) -> None: ...

    @classmethod
    def shared(cls, to: str) -> None: ...

    @staticmethod
    def plain(to: str) -> None: ...

    def __call__(self, to: str) -> None: ...


def send(to: str) -> None: ...


def many(*to: str) -> None: ...


def named(**to: str) -> None: ...


def each(to: str) -> Any:
    yield to


async def aeach(to: str) -> Any:
    yield to


def loose(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda to: None, "<lambda> is a lambda.* use def, or give it name="),
        (Mailer, "Mailer is a class; write a function"),
        (Mailer(), "Mailer is of type Mailer; write a function that calls it"),
        (Mailer().send, "send is a method of an object that no worker has"),
        (Mailer.shared, "shared is a method of an object that no worker has"),
        (Mailer.send, "send is a method: no worker has a 'self' for it; move it out"),
        (staticmethod(send), r"put @app\.task below @staticmethod"),
        (functools.partial(send, "a"), "partial, which has no name; write a function that"),
        (print, "builtin_function_or_method; write a function that calls it"),
        (many, "'many' takes \\*args or \\*\\*kwargs: .* stored by name"),
        (named, "'named' takes \\*args or"),
        (loose(many), "'many' takes \\*args or"),
        (each, "each is a generator"),
        (aeach, "aeach is a generator"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_function_with_a_name_is_refused(
    app: tenure.App, function: Any, why: str
) -> None:
    for decorate in (app.task, app.task(queue="exports")):
        with pytest.raises(tenure.TaskError, match=why):
            decorate(function)
    assert app.tasks == {}


def test_what_is_one_is_taken(app: tenure.App) -> None:
    app.task(Mailer.plain)
    app.task(loose(send))
    app.task(name="anonymous")(lambda to: None)

    assert [*app.tasks] == ["plain", "send", "anonymous"]
    assert app.tasks["send"].signature.names == ("to",)


def test_a_name_is_taken_once_be_it_an_alias(app: tenure.App) -> None:
    app.task(aliases=["mail", "post"])(send)

    for name, aliases in (("other", ["post"]), ("mail", []), ("other", ["send"]), ("x", ["x"])):
        with pytest.raises((tenure.DuplicateTask, tenure.ConfigError), match=r"named|its own name"):
            app.task(name=name, aliases=aliases)(lambda: None)
    with pytest.raises(tenure.ConfigError, match=r"aliases= takes a list of names.*\['mail'\]"):
        app.task(aliases="mail")
    with pytest.raises(tenure.ConfigError, match="an alias must be a string"):
        app.task(aliases=[7])  # type: ignore[list-item]
    assert {*app.tasks} == {"send", "mail", "post"}
    assert app.find_task("post").name == "send"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_conflict": "raise"}, "on_conflict is 'return' or 'error', got 'raise'"),
        ({"after_failed": "stop"}, "after_failed is 'wait' or 'cancel', got 'stop'"),
        ({"key": "k", "unique": True}, "unique is 'pending', got True"),
        ({"unique": "pending"}, "unique= says how long a key holds: give key=, too"),
    ],
)
def test_options_of_a_few_words(app: tenure.App, options: dict[str, Any], says: str) -> None:
    task = app.task(send)
    with pytest.raises(tenure.ConfigError, match=says):
        task.options(**options)


async def test_the_other_doors_ask_too(app: tenure.App) -> None:
    for call in (app.enqueue_jobs, app.client.enqueue):
        with pytest.raises(tenure.ConfigError, match="on_conflict is"):
            call([], on_conflict="raise")  # type: ignore[arg-type]
    with pytest.raises(tenure.ConfigError, match="on_conflict is"):
        await app.aenqueue_jobs([], on_conflict="raise")  # type: ignore[arg-type]
    app.close()


def test_unique_is_a_key_without_a_time_to_live(app: tenure.App) -> None:
    task = app.task(send)

    assert task.options(key="k", unique="pending").job("a").terms.key_ttl_ms == 0
    assert task.options(key="k").job("a").terms.key_ttl_ms == 7 * policy.DAY * 1000
