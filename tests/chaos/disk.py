"""A disk that can be full, read-only or lose its power: ext4 in a file, mounted over a folder.

The power cut is ext4's own: its shutdown ioctl, which xfstests uses, drops all that was not written
out. device-mapper's flakey and log-writes would do the same, where a kernel has device-mapper.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import time
from pathlib import Path

from tests.testbed.packages import find_program
from tests.testbed.programs import run_program

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN, linux/fs/ext4/ext4.h
# The journal is written out first, the files' bytes are not: names stand, contents are gone …
NAMES_WRITTEN = 1
# … or nothing is written out that nobody had asked for with fsync.
NOTHING_WRITTEN = 2
# Nothing reaches the disk by itself during a trial, and ext4's own safety nets for programs that
# do not call fsync are off (ext4(5): auto_da_alloc, data=ordered).
_HARSH = "loop,commit=300,noauto_da_alloc,data=writeback"


class Disk:
    """An image file and where it is mounted."""

    def __init__(self, image: Path, at: Path, size_bytes: int) -> None:
        self.image, self.at = image, at
        with image.open("wb") as file:
            file.truncate(size_bytes)
        lazy = "lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0"
        run_program("mkfs.ext4", "-q", "-F", "-m", "0", "-E", lazy, str(image))
        at.mkdir(parents=True, exist_ok=True)
        self.mount()
        (at / "lost+found").rmdir()

    def mount(self) -> None:
        run_program("mount", "-o", _HARSH, str(self.image), str(self.at))

    def settle(self) -> None:
        """All that was put there so far is on the disk."""
        handle = os.open(self.at, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        run_program("sync", "-f", str(self.at))

    def fill(self, free_bytes: int) -> Path:
        """A file that takes all space but so much; returns it, to be removed."""
        ballast = self.at / "ballast"
        here = os.statvfs(self.at)
        size = here.f_bavail * here.f_frsize - free_bytes
        if size > 0:
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        return ballast

    def become_read_only(self) -> None:
        """As ext4 does it by itself after an error: also for files that are open."""
        run_program("mount", "-o", "remount,abort", str(self.at))

    def cut_power(self, how: int) -> None:
        handle = os.open(self.at, os.O_RDONLY)
        fcntl.ioctl(handle, _SHUTDOWN, struct.pack("I", how))
        os.close(handle)

    def come_back(self) -> None:
        """Mounted anew, as after a boot: the journal is replayed, errors are forgotten."""
        self.unmount()
        fsck = [find_program("e2fsck"), "-p", str(self.image)]
        # 1: errors were corrected
        assert subprocess.run(fsck, capture_output=True, check=False).returncode < 4
        self.mount()

    def unmount(self) -> None:
        for _ in range(100):
            done = subprocess.run(
                [find_program("umount"), str(self.at)], capture_output=True, check=False
            )
            if done.returncode == 0 or b"not mounted" in done.stderr:
                return
            time.sleep(0.05)  # what was killed still closes its files
        raise RuntimeError(f"{self.at}: is still in use: {done.stderr.decode().strip()}")
