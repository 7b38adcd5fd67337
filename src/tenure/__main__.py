"""`python -m tenure` is the `tenure` command."""

from __future__ import annotations

from tenure.cli import main

raise SystemExit(main())
