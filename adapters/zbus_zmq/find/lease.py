"""A lease: the entry of a node in the registry, and whether that node is still alive.

Times for people are wall-clock times. Expiry follows the monotonic clock, which all processes of a host share, so
setting the clock expires no lease; leases of an earlier boot are void. If the process of a lease is visible and has
ended, its lease ends immediately.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec

from zbus.util.malformed import MALFORMED
from zbus.util.process import boot_id, is_alive, pid_namespace

from .discovery import NodeRecord

LEASE_BYTES_MAX = 16 << 20


class RegistryLease(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the registry."""

    version: int = 1
    realm: str
    node: NodeRecord
    lease_s: float
    allocated_by: str  # user, host and process
    allocated_at: str
    last_heartbeat_at: str
    beat_s: float  # the heartbeat by the monotonic clock
    boot: str
    pid: int
    pid_space: str  # the PID namespace of the process; a container has its own

    def renewed(self, node: NodeRecord) -> RegistryLease:
        """Return the lease with a new heartbeat."""
        return msgspec.structs.replace(self, node=node, last_heartbeat_at=_now(), beat_s=time.monotonic())

    def is_live(self) -> bool:
        """Return whether the node counts as alive."""
        return self.boot == boot_id() and -1.0 <= time.monotonic() - self.beat_s <= self.lease_s

    def is_void(self) -> bool:
        """Return whether any node may remove it: it expired long ago, or its process has ended."""
        if self.boot != boot_id() or time.monotonic() - self.beat_s > 2 * self.lease_s:
            return True
        return self.pid_space == _pid_space(os.getpid()) and not is_alive(self.pid)


def take_lease(realm: str, node: NodeRecord, lease_s: float) -> RegistryLease:
    """Return a new lease of this process."""
    now = _now()
    return RegistryLease(
        realm=realm,
        node=node,
        lease_s=lease_s,
        allocated_by=f"uid {os.getuid()} on {socket.gethostname()}, process {os.getpid()}",
        allocated_at=now,
        last_heartbeat_at=now,
        beat_s=time.monotonic(),
        boot=boot_id(),
        pid=os.getpid(),
        pid_space=_pid_space(os.getpid()),
    )


def describe_lease(lease: RegistryLease) -> dict[str, Any]:
    """Return a lease for people: its owner, its start, and how long it lasts without another heartbeat."""
    node = lease.node
    return {
        "realm": lease.realm,
        "node": node.node,
        "endpoints": [each for each in (node.publish, node.requests) if each],
        "lease_s": lease.lease_s,
        "left_s": round(max(0.0, lease.beat_s + lease.lease_s - time.monotonic()), 3),
        "allocated_by": lease.allocated_by,
        "allocated_at": lease.allocated_at,
        "last_heartbeat_at": lease.last_heartbeat_at,
        "pid": lease.pid,
    }


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(RegistryLease).decode


def encode_lease(lease: RegistryLease) -> bytes:
    """Return a lease as the content of its file."""
    return _encode(lease)


def decode_lease(data: bytes) -> RegistryLease | None:
    """Return the lease in the content of a file, or None if it is malformed."""
    try:
        lease = _decode(data)
    except MALFORMED:
        return None
    return lease if lease.version == 1 and lease.pid > 0 and lease.lease_s > 0 else None


def _now() -> str:
    return datetime.now(UTC).isoformat()


@lru_cache(maxsize=1)
def _pid_space(own_pid: int) -> str:
    return pid_namespace() or f"unknown to process {own_pid}"
