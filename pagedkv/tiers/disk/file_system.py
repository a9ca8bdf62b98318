"""The kind of file system a directory lies on.

Locks and syncs over a network do not give the guarantees that a store needs.
"""

from __future__ import annotations

import os
import re

NETWORK = frozenset({
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p", "ceph", "lustre", "gfs", "gfs2", "ocfs2"),
    *("beegfs", "gpfs", "panfs", "orangefs", "pvfs2", "virtiofs", "vboxsf", "prl_fs", "davfs"),
    *("fuse.sshfs", "fuse.glusterfs"),
    *("fuse.s3fs", "fuse.rclone", "fuse.ceph", "fuse.ceph-fuse", "fuse.cephfs", "fuse.gcsfuse", "fuse.juicefs"),
    *("fuse.mount-s3", "fuse.goofys", "fuse.moosefs", "fuse.mfs", "fuse.davfs", "fuse.curlftpfs", "fuse.seaweedfs"),
    *("fuse.weed", "fuse.hf3fs", "fuse.alluxio", "fuse.blobfuse", "fuse.blobfuse2", "fuse.smbnetfs"),
})  # fmt: skip
_ESCAPED = re.compile(r"\\([0-7]{3})")


def file_system_of(fd: int) -> str:
    """File system type of an open directory, by ``/proc/self/mountinfo``; ``""`` if unknown.

    The mount whose mount point is the longest beginning of the directory's path counts, and of several at one mount
    point the last, which hides the others. (Device numbers do not identify mounts: btrfs has one per subvolume.)
    """
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    longest, kind = -1, ""
    for line in lines:
        mount, _, source = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) < 5 or not source:
            continue
        point = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            longest, kind = len(point), source.split(" ")[0]
    return kind


def is_network(kind: str) -> bool:
    """Whether a type of file system keeps its files on other machines."""
    return kind in NETWORK
