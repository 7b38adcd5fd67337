"""Frozen values with named fields, for whatever `import tenure` loads.

What `@dataclass(frozen=True)` gives, for 0.02 ms a class. A dataclass compiles its methods from
text it writes: 0.7 ms a class in every process that imports it, after 8 ms for `dataclasses` and
`inspect`. Classes that `import tenure` does not load may well be dataclasses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, dataclass_transform

if TYPE_CHECKING:
    from inspect import Signature


def _signature(kind: type[Record]) -> Signature:
    from inspect import Parameter, Signature

    how = Parameter.POSITIONAL_OR_KEYWORD if kind.__match_args__ else Parameter.KEYWORD_ONLY
    return Signature(
        [
            Parameter(name, how, default=kind._defaults.get(name, Parameter.empty))
            for name in kind._fields
        ]
    )


class _ForHelp:
    """`help()` and editors ask for `__signature__`; it is made then."""

    def __get__(self, record: object, kind: type[Record]) -> Signature:
        if kind.__init__ is not Record.__init__:
            raise AttributeError("__signature__")  # they look at that method then
        return _signature(kind)


@dataclass_transform(frozen_default=True)
class Record:
    """Its fields are the annotated names, in order; a value in the class body is a default."""

    __signature__ = _ForHelp()
    __match_args__: ClassVar[tuple[str, ...]] = ()  # what may be given by position
    _fields: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        own = cls.__annotations__
        cls._fields = tuple(dict.fromkeys((*cls._fields, *own)))
        cls._defaults = cls._defaults | {name: vars(cls)[name] for name in own if name in vars(cls)}
        cls.__match_args__ = () if kw_only else cls._fields  # type: ignore[misc]  # not yet final

    def __init__(self, *args: Any, **named: Any) -> None:
        given = dict(zip(self.__match_args__, args, strict=False)) | named
        values = self._defaults | given
        if len(given) < len(args) + len(named) or values.keys() != set(self._fields):
            _signature(type(self)).bind(*args, **named)  # raises TypeError and says why
        vars(self).update(values)
        self.__post_init__()

    def __post_init__(self) -> None:
        """For the checks of a kind that has some."""

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self)[name] for name in self._fields))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={vars(self)[name]!r}" for name in self._fields)
        return f"{type(self).__qualname__}({shown})"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot delete field {name!r}")
