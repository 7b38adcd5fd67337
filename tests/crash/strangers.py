"""Other users of this machine, and a /proc that hides them. Needs root, unshare and setpriv."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import servers

ANN, BOB = 54_321, 54_322  # nobody's: the kernel asks for no account


def command_as(uid: int, *, hidden: bool = False) -> list[str]:
    """What to put before a command so that this user runs it; `hidden`: with a /proc on which
    others' processes cannot be seen (hidepid=2). The process stays the one that was started."""
    servers.require(_tools)
    # The interpreter may lie in a home of mode 700: reading is allowed, and nothing else.
    caps = "-all,+dac_read_search"
    prefix = [
        "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", f"--inh-caps={caps}",
        f"--ambient-caps={caps}", f"--bounding-set={caps}", "--",
    ]  # fmt: skip
    if hidden:
        hide = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
        prefix = ["unshare", "--mount", "sh", "-c", hide, "sh", *prefix]
    return prefix


def _tools() -> None:
    if os.geteuid() != 0:
        raise servers.Missing("other users can be had by root only")
    for tool in ("setpriv", "unshare"):
        if shutil.which(tool) is None:
            raise servers.Missing(f"{tool} is missing: apt-get install util-linux")


def open_to_all(folder: Path) -> None:
    """Whoever comes may write here."""
    (folder / "said.log").touch()
    folder.chmod(0o777)
    for path in folder.iterdir():
        path.chmod(0o666)
