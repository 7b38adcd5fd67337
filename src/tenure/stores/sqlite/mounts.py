"""Which file system a database is on. SQLite's write-ahead log needs memory that all its users
share and locks that hold for all of them, which no network file system gives: it goes well until
two machines write, and then jobs are lost or the file is damaged, without an error.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

# By the kernel's names in mountinfo. (statfs knows numbers only: one for every FUSE, and for 9p
# sometimes that of the disk behind it.)
NETWORK = frozenset({
    "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs", "gpfs", "lustre",
    "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs",
    "fuse.blobfuse", "fuse.blobfuse2", "fuse.ceph", "fuse.ceph-fuse", "fuse.curlftpfs",
    "fuse.davfs2", "fuse.gcsfuse", "fuse.geesefs", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs",
    "fuse.mfs", "fuse.mount-s3", "fuse.rclone", "fuse.s3fs", "fuse.smbnetfs", "fuse.sshfs",
})  # fmt: skip
# The directory of a virtual machine's host: fine while only this machine opens the file.
SHARED = frozenset(
    {"9p", "virtiofs", "vboxsf", "prl_fs", "vmhgfs", "fuse.vmhgfs-fuse", "fakeowner"}
)
OTHER_FUSE = re.compile(r"fuse(\.|$)")  # not fuseblk, which is a disk


class Mount(NamedTuple):
    kind: str
    at: str

    @property
    def risk(self) -> str:
        """`refused`, `doubtful`, or nothing."""
        if self.kind in NETWORK:
            return "refused"
        return "doubtful" if self.kind in SHARED or OTHER_FUSE.match(self.kind) else ""


def mount_of(path: str, mountinfo: str = "/proc/self/mountinfo") -> Mount | None:
    """Where the directory of `path` is mounted; None where the kernel does not say (not Linux)."""
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    directory, found = os.path.dirname(path), None
    for line in lines:
        fields, _, about = line.partition(" - ")
        at = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split(" ")[4])
        covers = directory == at or directory.startswith(at.rstrip("/") + "/")
        # The deepest counts, and of two at the same place the later.
        if covers and (found is None or len(at) >= len(found.at)):
            found = Mount(about.split(" ")[0], at)
    return found
