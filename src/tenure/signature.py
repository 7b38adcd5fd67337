"""A task's arguments: packed by name at enqueue, checked against the types, unpacked at the run.

The check is the same at both ends: the JSON text is decoded into the annotated types. Types that
JSON has no word for (datetimes, paths, dataclasses, pydantic models) are turned into JSON on the
way in.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from tenure import payload, secrecy
from tenure.context import Context
from tenure.errors import ArgumentError, PayloadError, TaskError


class Signature:
    def __init__(
        self,
        function: Callable[..., Any],
        task: str,
        max_bytes: int,
        not_secret: tuple[str, ...] = (),
    ) -> None:
        self.task = task
        self.max_bytes = max_bytes
        self._not_secret = frozenset(not_secret)
        self.is_async = inspect.iscoroutinefunction(function)
        parameters = list(inspect.signature(function).parameters.values())
        hints = _hints(function)
        self.takes_context = bool(parameters) and hints.get(parameters[0].name) is Context
        if self.takes_context:
            del parameters[0]
        for parameter in parameters:
            if hints.get(parameter.name) is Context:
                raise TaskError(
                    f"Task {task!r} takes its Context as {parameter.name!r}: make it the first "
                    "parameter."
                )
        self.names = tuple(parameter.name for parameter in parameters)
        self._known = frozenset(self.names)
        self._required = frozenset(
            parameter.name for parameter in parameters if parameter.default is parameter.empty
        )
        self._positional_only = sum(p.kind is p.POSITIONAL_ONLY for p in parameters)
        self._positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
        self._decoder = _decoder(task, parameters, hints)

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The arguments as checked JSON text, or an error that says how to call the task."""
        if len(args) > self._positional:
            raise ArgumentError(
                f"Task {self.task!r} got {len(args)} positional arguments; it takes "
                f"{self._positional}: ({', '.join(self.names)})."
            )
        given = dict(zip(self.names, args, strict=False))
        for name in kwargs:
            if name in given:
                raise ArgumentError(f"Task {self.task!r} got two values for {name!r}.")
        given.update(kwargs)
        return self.pack_named(given)

    def pack_named(self, given: dict[str, Any]) -> str:
        for name in given:
            if name not in self._known:
                raise ArgumentError(
                    f"Task {self.task!r} got an unexpected argument {name!r}; it takes "
                    f"({', '.join(self.names)})."
                ).quoting(repr(name))
        missing = self._required - given.keys()
        if missing:
            hint = (
                " For a Context annotate it: (ctx: tenure.Context, …)."
                if self.names[0] in missing & {"ctx", "context"}
                else ""
            )
            raise ArgumentError(
                f"Task {self.task!r} is missing {', '.join(map(repr, sorted(missing)))}; it takes "
                f"({', '.join(self.names)}).{hint}"
            )
        what = f"arguments of {self.task!r}"
        try:
            text = payload.encode(given, what=what, max_bytes=self.max_bytes)
        except PayloadError as refused:
            if not refused.foreign:
                raise
            text = self._converted(given, what)
            # Converted on the way in (a datetime, a model): it must come back as it was.
            if not _same(self.unpack(text), given):
                raise
        else:
            self._typed(text)
        return text

    def refuse_secrets(self, text: str) -> tuple[str, ...]:
        """Which of the paths the task calls `not_secret` have let something pass."""
        if not secrecy.looks_secret(text):
            return ()
        waived = set()
        for found in secrecy.findings(payload.decode(text)):
            path = secrecy.any_index(found.path)
            if path not in self._not_secret or found.key:
                looks = found.about(f"arguments of {self.task!r}")
                for_good = "" if found.key else f'@app.task(not_secret=("{path}",)) for good, or '
                raise PayloadError(
                    f"{looks}. Pass a reference to it (in a field ending in _ref) and read it in "
                    f'the handler with ctx.secret("ref"). If it is not a secret: {for_good}'
                    "options(allow_secret=True) for once."
                ).quoting(found.path, path)
            waived.add(path)
        return tuple(sorted(waived))

    def unpack(self, text: str) -> dict[str, Any]:
        """The arguments in the types the function asks for; a bad one is named, never shown."""
        values = self._typed(text)
        return {
            name: value
            for name in self.names
            if (value := getattr(values, name)) is not msgspec.UNSET
        }

    def _typed(self, text: str) -> Any:
        try:
            return self._decoder.decode(text)
        except msgspec.ValidationError as error:
            why = _readable(error)
        except (msgspec.DecodeError, UnicodeError, RecursionError):  # stored by somebody's SQL
            raise ArgumentError(
                f"Task {self.task!r}: its arguments are not JSON, or nested too deeply to be read"
            ).quoting() from None
        raise ArgumentError(f"Task {self.task!r}: {why}").quoting(why)

    def call(
        self, function: Callable[..., Any], context: Context | None, given: dict[str, Any]
    ) -> Any:
        """`context` for a function that takes one, else None."""
        leading: list[Any] = [] if context is None else [context]
        for name in self.names[: self._positional_only]:
            if name in given:
                leading.append(given.pop(name))
        return function(*leading, **given)

    def encode(self, value: Any, what: str) -> str:
        try:
            return payload.encode(value, what=what, max_bytes=self.max_bytes)
        except PayloadError as refused:
            if not refused.foreign:
                raise
            return self._converted(value, what)

    def _converted(self, value: Any, what: str) -> str:
        return payload.encode(_builtins(value, what), what=what, max_bytes=self.max_bytes)


def _builtins(value: Any, what: str) -> Any:
    """Dataclasses, models, datetimes as JSON has them; what nobody can convert, unchanged. Here
    run methods of the value's own, and whatever one of them raises is no answer to the caller."""
    try:
        return msgspec.to_builtins(value, enc_hook=_to_json, str_keys=True)
    except TypeError:
        return value
    except Exception as error:
        path = _culprit(value)
        if isinstance(error, RecursionError):
            why = f"is nested deeper than {payload.MAX_DEPTH} levels or contains itself; flatten it"
        else:
            why = (
                f"cannot be turned into JSON: that raised {type(error).__name__}; pass plain values"
            )
        raise PayloadError(f"{what}{path} {why}").quoting(path) from None


def _culprit(value: Any) -> str:
    """The path to the first part that cannot be converted by itself, or none."""
    for name, part in value.items() if type(value) is dict else ():
        try:
            msgspec.to_builtins(part, enc_hook=_to_json, str_keys=True)
        except TypeError:
            continue
        except Exception:
            return f".{name}"
    return ""


def _same(left: object, right: object) -> bool:
    try:
        return bool(left == right)
    except Exception:  # an __eq__ of the caller's own, such as an array's
        return False


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # an annotation only a type checker can resolve
        return {
            name: Context if hint in (Context, "Context", "tenure.Context") else Any
            for name, hint in getattr(function, "__annotations__", {}).items()
        }


def _decoder(
    task: str, parameters: list[inspect.Parameter], hints: dict[str, Any]
) -> msgspec.json.Decoder[Any]:
    """A decoder for exactly these arguments. A type msgspec cannot check is not checked."""
    fields: list[tuple[str, Any, Any]] = []
    for parameter in parameters:
        hint = hints.get(parameter.name, Any)
        try:
            msgspec.json.Decoder(hint, dec_hook=_from_json)
        except TypeError:
            hint = Any
        optional = parameter.default is not parameter.empty
        fields.append((parameter.name, hint | msgspec.UnsetType if optional else hint,
                       msgspec.UNSET if optional else msgspec.NODEFAULT))  # fmt: skip
    name = "".join(c if c.isalnum() else "_" for c in task)
    struct = msgspec.defstruct(
        f"Arguments_{name}", fields, kw_only=True, forbid_unknown_fields=True
    )
    return msgspec.json.Decoder(struct, dec_hook=_from_json)


def _from_json(wanted: Any, value: Any) -> Any:
    """Types msgspec does not know: paths are text, pydantic models validate themselves."""
    if hasattr(wanted, "model_validate"):
        try:
            return wanted.model_validate(value)
        except ValueError as error:
            raise ValueError(f"not a valid {wanted.__name__} ({type(error).__name__})") from None
    if isinstance(wanted, type) and isinstance(value, wanted):
        return value
    if isinstance(value, str) and _is_path(wanted):
        return wanted(value)
    raise ValueError(f"cannot be read as {wanted!r}")


def _to_json(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if _is_path(type(value)):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be stored as JSON")


def _is_path(kind: Any) -> bool:
    from pathlib import PurePath  # 4 ms, for who comes here with something of their own

    return isinstance(kind, type) and issubclass(kind, PurePath)


def _readable(error: msgspec.ValidationError) -> str:
    """msgspec names the place as `$.items[...]`: say it as an argument. It shows the value that is
    none of an enum's: we do not."""
    message, at, place = str(error).rpartition(" - at `$.")
    if not at:
        message, place = place, ""
    message = re.sub(r"(?s)^(Invalid (?:enum )?value) .*", r"\1", message.replace("`", ""))
    return f"argument {place.rstrip('`')}: {message[:1].lower()}{message[1:]}" if place else message
