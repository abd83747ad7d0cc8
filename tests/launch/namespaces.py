"""Two machines on one: network namespaces with addresses of their own, joined by a cable that can be cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLES = ("tv0", "tv1")


def why_not() -> str:
    """Why there can be none here."""
    if os.geteuid():
        return "network namespaces with addresses of their own need root"
    if missing := [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]:
        return f"{missing[0]} is not installed"
    try:
        with two():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip()}"


class Two:
    """Two namespaces, by their processes: `ip netns` would leave names in /run, which other runs share."""

    def __init__(self) -> None:
        self.holders: list[subprocess.Popen[bytes]] = []

    def inside(self, node: int) -> list[str]:
        """What to put before a command that is to run on a machine."""
        return ["nsenter", f"--net=/proc/{self.holders[node].pid}/ns/net"]

    def ip(self, node: int, *words: str) -> None:
        subprocess.run([*self.inside(node), "ip", *words], check=True, capture_output=True, text=True)

    def cut(self) -> None:
        self.ip(0, "link", "set", CABLES[0], "down")
        self.ip(1, "link", "set", CABLES[1], "down")


@contextlib.contextmanager
def two() -> Iterator[Two]:
    """Two machines, until the end of the context."""
    made = Two()
    try:
        for _ in range(2):
            holder = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
            made.holders.append(holder)
            assert holder.stdout is not None
            if not holder.stdout.readline():
                raise subprocess.CalledProcessError(holder.wait(), "unshare", stderr="the kernel forbids them")
        there = f"/proc/{made.holders[1].pid}/ns/net"
        peer = ("peer", "name", CABLES[1], "netns", str(made.holders[1].pid))
        assert Path(there).exists()
        made.ip(0, "link", "add", CABLES[0], "type", "veth", *peer)
        for node, (address, cable) in enumerate(zip(ADDRESSES, CABLES, strict=True)):
            made.ip(node, "address", "add", f"{address}/24", "dev", cable)
            made.ip(node, "link", "set", cable, "up")
            made.ip(node, "link", "set", "lo", "up")
        yield made
    finally:
        for holder in made.holders:
            holder.kill()
            holder.wait()
            if holder.stdout is not None:
                holder.stdout.close()
