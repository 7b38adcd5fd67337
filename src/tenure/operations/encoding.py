"""Values of operations as JSON has them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from tenure.record import Record
from tenure.stored import Job


def to_json(value: Any) -> Any:
    """What `json.dumps` takes: values by their field names, times in UTC to the millisecond
    (RFC 3339), lengths of time in seconds. A job has its `uuid` besides; its `payload` is in it,
    which may be personal: pages and listings leave that out."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {key: to_json(part) for key, part in value.items()}
    if (names := _names(value)) is not None:
        shown = {name: to_json(getattr(value, name)) for name in names}
        return shown | {"uuid": str(value.uuid)} if isinstance(value, Job) else shown
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(part) for part in value]
    return str(value)


def _names(value: Any) -> tuple[str, ...] | None:
    """The fields of a Record, a named tuple or a dataclass."""
    if isinstance(value, Record) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        names: tuple[str, ...] = value._fields
        return names
    if is_dataclass(value):
        return tuple(field.name for field in fields(value))
    return None
