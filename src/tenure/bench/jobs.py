"""The app that `tenure bench` measures: tasks that do nothing, or next to nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import tenure

app = tenure.App()  # $TENURE_URL names the benchmark's own file


@app.task
async def nothing(data: dict[str, Any]) -> None:
    """What a drain is made of."""


@app.task
async def clock(data: dict[str, Any]) -> float:
    """When it started, by the wall clock, which is the same for all processes of a machine."""
    return time.time()


@app.task
async def sleep(seconds: float) -> tuple[float, float]:
    """When it started and when it ended."""
    began = time.time()
    await asyncio.sleep(seconds)
    return began, time.time()
