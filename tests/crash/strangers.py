"""Other users of this machine, and a /proc that hides them. Needs root, unshare and setpriv."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import servers

ANN, BOB = 54_321, 54_322  # nobody's: the kernel asks for no account


def command_as(uid: int, *, hidden: bool = False) -> list[str]:
    """What to put before a command so that this user runs it; `hidden`: with a /proc on which
    others' processes cannot be seen (hidepid=2). The process stays the one that was started."""
    servers.require(_other_users)
    # The interpreter may lie in a home of mode 700: reading is allowed, and nothing else.
    caps = "-all,+dac_read_search"
    prefix = [
        "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", f"--inh-caps={caps}",
        f"--ambient-caps={caps}", f"--bounding-set={caps}", "--",
    ]  # fmt: skip
    if hidden:
        prefix = [*mounting("-t proc -o hidepid=2 proc /proc"), *prefix]
    return prefix


def mounting(what: str) -> list[str]:
    """What to put before a command so that it sees this mount, and nobody else does."""
    servers.require(_own_mounts)
    return ["unshare", "--mount", "sh", "-c", f'mount {what} && exec "$@"', "sh"]


def be_root() -> None:
    if os.geteuid() != 0:
        raise servers.Missing("other users, and mounts of one's own, can be had by root only")


def _other_users() -> None:
    be_root()
    if shutil.which("setpriv") is None:
        raise servers.Missing("setpriv is missing: apt-get install util-linux")


def _own_mounts() -> None:
    be_root()
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if shutil.which("unshare") is None or subprocess.run(probe, check=False).returncode:
        raise servers.Missing("this root may not mount (a container without CAP_SYS_ADMIN?)")


def open_to_all(folder: Path) -> None:
    """Whoever comes may write here."""
    (folder / "said.log").touch()
    folder.chmod(0o777)
    for path in folder.iterdir():
        path.chmod(0o666)
