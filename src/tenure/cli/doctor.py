"""`tenure doctor`: what is wrong, and what to do about it. Exit code 1 when there is a problem."""

from __future__ import annotations

import argparse

from tenure.cli import target
from tenure.terminal import output

MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "red")}


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(
        commands, "doctor", "say what is wrong with the database, the workers and the queues"
    )
    parser.set_defaults(run=examine)


def examine(args: argparse.Namespace) -> int:
    with target.anywhere(args) as (_, operations, named):
        findings = operations.health.findings(knows_tasks=named)
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if args.json:
        for finding in findings:
            output.say_json(finding)
        return 1 if problems else 0
    for finding in findings:
        mark, colour = MARKS[finding.level]
        output.say(f"{output.paint(mark, colour)} {finding.check}: {output.plain(finding.message)}")
        if finding.remedy:
            output.say(f"    → {output.plain(finding.remedy)}")
    found = f"{output.count(problems, 'problem')}, {output.count(warnings, 'warning')}"
    output.say(found if problems or warnings else "all well")
    return 1 if problems else 0
