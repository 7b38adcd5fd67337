"""Tenure in a Django project: `INSTALLED_APPS = [..., "tenure.integrations.django"]`.

`from tenure.integrations.django import app` is the project's app, for `@app.task` in the `tasks.py`
of each of its apps. Settings: `TENURE = {"url": …, "concurrency": …}`; without a URL jobs are in
`DATABASES["default"]`, or in the one that `TENURE = {"database": alias}` names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenure.integrations.django.project import DjangoApp

    app: DjangoApp


def __getattr__(name: str) -> Any:
    """Made when first asked for: Django imports this package before its settings can be used."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tenure.integrations.django.project import project_app

    return project_app()


__all__ = ["app"]
