"""Find the app that `-A module:attr` names, or say in one sentence why it cannot be had."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from tenure.app import App
from tenure.errors import ConfigError


def load_app(spec: str) -> App:
    """`module:attr`, or `module` when it holds a single tenure.App."""
    module_name, colon, path = spec.partition(":")
    if "/" in module_name or module_name.endswith(".py") or not module_name:
        raise ConfigError(
            f"-A {spec!r} is not a module: write it as Python imports it, such as shop.jobs:app"
        )
    _set_up_django()
    module = _import(module_name)
    if not colon:
        apps = {id(value): name for name, value in vars(module).items() if isinstance(value, App)}
        if len(apps) != 1:
            names = [f"{module_name}:{name}" for name in apps.values()]
            found = (
                f"found {', '.join(names)}. Say which: -A {names[0]}"
                if names
                else "found none. Name the module that makes it, such as -A shop.jobs:app"
            )
            raise ConfigError(
                f"module {module_name!r} must hold exactly one tenure.App for -A {module_name}; "
                f"{found}"
            )
        path = next(iter(apps.values()))
    found_app: object = module
    for name in path.split("."):
        found_app = getattr(found_app, name, None)
    if not isinstance(found_app, App):
        apps_there = [name for name, value in vars(module).items() if isinstance(value, App)]
        hint = f"; it has {module_name}:{apps_there[0]}" if apps_there else ""
        kind = "not there" if found_app is None else f"a {type(found_app).__name__}"
        raise ConfigError(f"-A {spec}: {path!r} is {kind}, it must be a tenure.App{hint}")
    return found_app


def _set_up_django() -> None:
    """Where a Django project says that it is one: its tasks import models."""
    named = os.environ.get("DJANGO_SETTINGS_MODULE")
    if not named or importlib.util.find_spec("django") is None:
        return
    import django

    _look_here()
    try:
        django.setup()
    except ConfigError:
        raise
    except Exception as error:
        raise _broken(f"the Django project of DJANGO_SETTINGS_MODULE={named}", error) from error


def _look_here() -> None:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)


def _import(name: str) -> Any:
    _look_here()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise _broken(repr(name), error) from error
        raise ConfigError(
            f"there is no module {name!r} to import: run tenure in the directory that contains "
            "it, install its package, or correct -A"
        ) from None
    except Exception as error:
        raise _broken(repr(name), error) from error


def _broken(name: str, error: Exception) -> ConfigError:
    """The user's module raised: say what and where, without our own frames around it."""
    if isinstance(error, SyntaxError) and error.filename:
        what, place = error.msg, f" ({error.filename}:{error.lineno})"
        return ConfigError(f"importing {name} failed: {type(error).__name__}: {what}{place}")
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "importlib" not in file:
            place = f" ({file}:{trace.tb_lineno})"
        trace = trace.tb_next
    return ConfigError(f"importing {name} failed: {type(error).__name__}: {error}{place}")
