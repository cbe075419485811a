"""Parts of this machine that only some processes see: a network of their own, or a small disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cable import until

NEAR, FAR = "10.203.77.1", "10.203.77.2"
"""Addresses of the two ends of `Wires`."""
SMALL_DISK = 'mount -t tmpfs -o size=1m none "$0" && { head -c 2m /dev/zero > "$0/filler"; exec "$@"; }'


def needs(*tools: str, namespaces: str) -> None:
    """Skip a test where these tools are not there, or namespaces are not allowed."""
    for tool in ("unshare", "nsenter", *tools):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    tried = subprocess.run(["unshare", namespaces, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"namespaces are not allowed here: {tried.stderr.strip()}")


def full_disk(folder: Path) -> list[str]:
    """Words before a command that let it see a full disk of 1 MB in the place of a folder."""
    needs("mount", namespaces="-rm")
    folder.mkdir(exist_ok=True)
    return ["unshare", "-rm", "sh", "-c", SMALL_DISK, str(folder)]


class Wires:
    """Two networks and a bridge between them, which can drop all packets without a word to either end."""

    def __init__(self) -> None:
        needs("ip", namespaces="-rn")
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            near = self._holder("unshare", "-rn")
            self.near = ["nsenter", "-t", str(near.pid), "-U", "-n", "--preserve-credentials"]
            far = self._holder(*self.near, "unshare", "-n")
            self.far = ["nsenter", "-t", str(far.pid), "-U", "-n", "--preserve-credentials"]
            self._ip(self.near, "link add bridge0 type bridge")
            self._ip(self.near, f"link add near0 type veth peer name far0 netns {far.pid}")
            self._ip(self.near, "link set near0 master bridge0")
            for side, links in ((self.near, ("lo", "bridge0", "near0")), (self.far, ("lo", "far0"))):
                for link in links:
                    self._ip(side, f"link set {link} up")
            self._ip(self.near, f"addr add {NEAR}/24 dev bridge0")
            self._ip(self.far, f"addr add {FAR}/24 dev far0")
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"no network can be made here: {error.stderr.decode().strip()}")

    def cut(self) -> None:
        """Drop all packets from now on."""
        self._ip(self.near, "link set near0 nomaster")

    def mend(self) -> None:
        """Let packets through again."""
        self._ip(self.near, "link set near0 master bridge0")

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def _holder(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a process that does nothing in a network of its own, which is there as long as it is."""
        held = subprocess.Popen([*words, "sleep", "3600"])
        self._holders.append(held)
        until(lambda: Path(f"/proc/{held.pid}/comm").read_text() == "sleep\n")
        assert os.readlink(f"/proc/{held.pid}/ns/net") != os.readlink("/proc/self/ns/net")
        return held

    @staticmethod
    def _ip(side: list[str], words: str) -> None:
        subprocess.run([*side, "ip", *words.split()], check=True, capture_output=True)
