"""A Flask application that enqueues: the request is answered at once, the work is done later.

pip install flask && flask --app examples/flask_app.py run
tenure -A flask_app:jobs worker          # in examples/, in another terminal
"""

from __future__ import annotations

import os

from flask import Flask, abort, request
from flask.typing import ResponseReturnValue

import tenure

jobs = tenure.App(os.environ.get("TENURE_URL") or "sqlite:///flask-jobs.db")
web = Flask(__name__)


@jobs.task(category="notification")
def welcome(email: str) -> str:
    return f"welcomed {email}"


@web.post("/signup")
def signup() -> ResponseReturnValue:
    email = request.form["email"]
    with tenure.acting(actor=("user", email), request_id=request.headers.get("X-Request-Id")):
        receipt = welcome.options(key=f"welcome:{email}").enqueue(email)
    return {"job": receipt.id, "duplicate": receipt.duplicate}, 202


@web.get("/jobs/<id>")
def job(id: str) -> ResponseReturnValue:
    found = jobs.get(id)
    if found is None:
        abort(404)
    return {"status": found.status, "result": found.result}


app = web  # what `flask run` looks for
