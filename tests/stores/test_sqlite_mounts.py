"""Network file systems: SQLite's log loses jobs there without an error, so they are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tenure import errors
from tenure.stores.sqlite import SqliteStore, mounts

from .sqlite_files import jobs, needs_root, python

MOUNTS = r"""
22 28 0:20 / /sys rw,nosuid - sysfs sysfs rw
28 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 28 0:35 / /srv rw - nfs4 files:/srv rw,vers=4.2
41 40 0:36 / /srv/fast rw - xfs /dev/vdb rw
42 28 0:37 / /mnt/with\040space rw - cifs //nas/share rw
43 28 0:38 / /mnt/c rw - 9p C:\134 rw
44 28 0:39 / /far rw master:3 - fuse.sshfs ann@far:/srv rw
45 28 0:40 / /media/stick rw - fuseblk /dev/sdb1 rw
46 28 0:41 / /data rw - fuse.gizmofs gizmo rw
47 28 0:42 / /var rw - tmpfs tmpfs rw
48 28 0:43 / /var rw - nfs files:/var rw
49 28 0:44 / /overlay rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "risk"),
    [
        ("/jobs.db", "ext4", ""),
        ("/srv/jobs.db", "nfs4", "refused"),
        ("/srv/a/b/jobs.db", "nfs4", "refused"),
        ("/srvx/jobs.db", "ext4", ""),
        ("/srv/fast/jobs.db", "xfs", ""),
        ("/mnt/with space/jobs.db", "cifs", "refused"),
        ("/mnt/c/jobs.db", "9p", "doubtful"),
        ("/far/ann/jobs.db", "fuse.sshfs", "refused"),
        ("/media/stick/jobs.db", "fuseblk", ""),
        ("/data/jobs.db", "fuse.gizmofs", "doubtful"),
        ("/var/jobs.db", "nfs", "refused"),
        ("/overlay/jobs.db", "overlay", ""),
    ],
)
def test_which_file_system_it_is(tmp_path: Path, path: str, kind: str, risk: str) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS.lstrip())
    found = mounts.mount_of(path, str(table))

    assert found is not None
    assert (found.kind, found.risk) == (kind, risk)


def test_nobody_is_refused_where_the_kernel_does_not_tell(tmp_path: Path) -> None:
    assert mounts.mount_of("/srv/jobs.db", str(tmp_path / "absent")) is None


def test_here_it_tells(tmp_path: Path) -> None:
    found = mounts.mount_of(str(tmp_path / "jobs.db"))

    assert found is None or os.path.ismount(found.at)


# A namespace of its own with three mounts: a network file system and one that nobody has heard of,
# as far as the kernel can tell (FUSE, with a server that knows nothing but an empty directory), and
# a local one.
PROGRAM = r"""
import ctypes, errno, json, logging, os, stat, struct, sys, threading
from tenure.stores.sqlite import SqliteStore
from tenure.ids import new_ids
from tenure.job import NewJob, Terms

libc = ctypes.CDLL(None, use_errno=True)
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE, CLONE_NEWNS = 2, 4, 0x4000, 0x40000, 0x20000
FORGET, GETATTR, INIT, BATCH_FORGET = 2, 3, 26, 42

def checked(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def serve(handle):
    while True:
        try:
            request = os.read(handle, 1 << 17)
        except OSError:
            return
        _length, kind, unique, _node = struct.unpack_from("IIQQ", request)
        code, answer = 0, b""
        if kind in (FORGET, BATCH_FORGET):
            continue
        if kind == INIT:
            answer = struct.pack("IIIIHHIIHHI28x", 7, 31, 0, 0, 1, 1, 4096, 1, 0, 0, 0)
        elif kind == GETATTR:
            answer = struct.pack("QII", 60, 0, 0) + struct.pack(
                "6Q10I", 1, 0, 0, 0, 0, 0, 0, 0, 0, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 4096, 0)
        else:
            code = -errno.ENOENT if kind == 1 else -errno.ENOSYS
        os.write(handle, struct.pack("IiQ", 16 + len(answer), code, unique) + answer)

def mount_fuse(at, kind):
    os.mkdir(at)
    handle = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={handle},rootmode=40000,user_id=0,group_id=0".encode()
    checked(libc.mount(b"test", at.encode(), kind.encode(), MS_NOSUID | MS_NODEV, options))
    threading.Thread(target=serve, args=(handle,), daemon=True).start()

def attempt(at, **options):
    store = SqliteStore(at + "/jobs.db", **options)
    terms = Terms("noop", "default", 5, "default", 5, 300_000, 1000)
    try:
        store.enqueue([NewJob(id, terms, "{}") for id in new_ids(1)])
        return "stored"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

folder = sys.argv[1]
try:
    checked(libc.unshare(CLONE_NEWNS))
except PermissionError as error:  # a container's root
    print(json.dumps({"cannot": f"no mount namespace: {error}"}), flush=True)
    os._exit(0)
checked(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
os.mkdir(folder + "/local")
checked(libc.mount(b"tmpfs", (folder + "/local").encode(), b"tmpfs", 0, None))
mount_fuse(folder + "/remote", "fuse.sshfs")
mount_fuse(folder + "/other", "fuse.gizmofs")
logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
os.symlink(folder + "/remote", folder + "/link")
print(json.dumps({
    "local": attempt(folder + "/local"),
    "remote": attempt(folder + "/remote"),
    "link": attempt(folder + "/link"),
    "insisting": attempt(folder + "/remote", allow_network=True),
    "other": attempt(folder + "/other"),
}))
sys.stdout.flush()
os._exit(0)
"""


@needs_root
@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="this kernel has no FUSE to mount")
def test_a_real_mount(tmp_path: Path) -> None:
    said = json.loads(python(PROGRAM, tmp_path))
    if "cannot" in said:
        pytest.skip(said["cannot"])

    assert said["local"] == "stored"
    for where in ("remote", "link"):
        assert "is on a network file system (fuse.sshfs at" in said[where]
        assert "TENURE_ALLOW_NETWORK_FILE=1" in said[where]
    # No longer refused by us, but by the file system itself, which can store nothing.
    assert said["insisting"].startswith("StoreUnavailable:")
    assert "network" not in said["insisting"]
    assert said["other"].startswith("StoreUnavailable:")
    assert "network" not in said["other"]


def test_refused_warned_about_and_told_by_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no such file system can be mounted: only the kernel's answer is made up."""
    found = [mounts.Mount("nfs4", "/srv")]
    monkeypatch.setattr(mounts, "mount_of", lambda _path: found[0])
    path = tmp_path / "jobs.db"
    with pytest.raises(errors.StoreUnavailable, match=r"nfs4 at /srv.*postgresql"):
        SqliteStore(str(path)).enqueue(jobs(1))
    assert list(tmp_path.iterdir()) == []

    insisting = SqliteStore(str(path), allow_network=True)
    insisting.enqueue(jobs(1))
    finding = insisting.inspect()[-1]
    assert (finding.check, finding.level) == ("file system", "problem")
    assert "nfs4" in finding.message
    insisting.close()

    found[0] = mounts.Mount("virtiofs", "/srv")
    caplog.clear()
    doubtful = SqliteStore(str(path))
    doubtful.enqueue(jobs(1))
    assert "is on virtiofs" in caplog.text
    assert doubtful.inspect()[-1].level == "warning"
    doubtful.close()
