"""A FastAPI application that enqueues with `await`, and works in the same process.

pip install fastapi uvicorn && uvicorn --app-dir examples fastapi_app:web
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException

import tenure

jobs = tenure.App(os.environ.get("TENURE_URL") or "sqlite:///fastapi-jobs.db")


@jobs.task(queue="exports")
async def export(rows: int) -> dict[str, int]:
    return {"rows": rows}


@asynccontextmanager
async def lifespan(_web: FastAPI) -> AsyncIterator[None]:
    """Small deployments: a worker in the web process. Larger ones run `tenure worker`."""
    with jobs.worker(concurrency=10):
        yield
    jobs.close()


web = FastAPI(lifespan=lifespan)


@web.post("/exports", status_code=202)
async def start(rows: int) -> dict[str, str]:
    receipt = await export.aenqueue(rows)
    return {"job": receipt.id}


@web.get("/exports/{id}")
async def result(id: str) -> dict[str, object]:
    job = await jobs.aget(id)
    if job is None:
        raise HTTPException(404)
    return {"status": job.status, "result": job.result}
