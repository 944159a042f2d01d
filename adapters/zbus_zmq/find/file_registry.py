"""Discovery on one host: a folder with one file per node.

Each node replaces its own file by renaming, and again with each heartbeat. A reader checks the folder's time stamp many
times a second and reads the files that changed. A lease that has expired is ignored immediately; any node that sees a
lease long expired removes its file. A node whose file was removed writes it again with its next heartbeat.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbus.errors import ConfigInvalid, TransportError
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_DISCOVERY_FAILED
from zbus.observe.throttle import Throttle
from zbus.util.backoff import Backoff
from zbus_zmq.address.options import ZmqOptions

from .discovery import Discovery, NodeRecord, Nodes
from .lease import LEASE_BYTES_MAX, RegistryLease, decode_lease, encode_lease, take_lease
from .watching import WatchingDiscovery

FULL_SCAN_S = 0.5  # an expired lease does not change the folder's time stamp
THOROUGH_S = 0.25  # how often processes are checked
FRESH_S = 0.1  # two changes within one tick of the file system's clock leave one time stamp
PAUSE_MAX_S = 1.0
SUFFIX, DRAFT = ".json", ".draft"
DRAFT_S = 60.0


class FileRegistry(WatchingDiscovery):
    """A folder of leases. One thread keeps our own alive and watches those of others."""

    def __init__(self, options: ZmqOptions, counts: Counters) -> None:
        super().__init__()
        self.folder = _private_folder(options.registry)
        self._realm, self._lease_s, self._poll_s, self._counts = options.realm, options.lease_s, options.poll_s, counts
        self._own: RegistryLease | None = None
        self._beat_due = 0.0
        self._process_checks = Throttle(THOROUGH_S)
        self._known: dict[str, tuple[tuple[int, int, int], RegistryLease | None]] = {}  # by file name
        self._start("zbus-zmq-registry")

    def announce(self, node: NodeRecord) -> None:
        """Write our file now."""
        with self._lock:
            self._own = take_lease(self._realm, node, self._lease_s) if self._own is None else self._own.renewed(node)
            try:
                self._write(self._own)
            except OSError as error:
                raise TransportError(f"the registry {self.folder} cannot be written: {error.strerror}") from error

    def look(self) -> Nodes:
        """Read the folder now."""
        try:
            return self._nodes()
        except OSError as error:
            raise TransportError(f"the registry {self.folder} cannot be read: {error.strerror}") from error

    def leases(self) -> list[RegistryLease]:
        """Return every live lease of our realm, and remove those that expired long ago."""
        with self._lock:
            found, seen = [], set()
            thorough = self._process_checks.due()  # checking processes costs more than reading files
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    seen.add(entry.name)
                    lease = self._read(entry)
                    if lease is None:
                        continue
                    if (thorough or not lease.is_live()) and lease.is_void():
                        self._reap(entry.name)
                    elif lease.is_live() and lease.realm == self._realm:
                        found.append(lease)
            self._known = {name: known for name, known in self._known.items() if name in seen}
            return found

    def _describe(self) -> dict[str, Any]:
        return {"discovery": "file", "registry": str(self.folder)}

    def _withdraw(self) -> None:
        """Remove our file."""
        own, self._own = self._own, None
        try:
            if own is not None:
                self._path(own).unlink(missing_ok=True)
        except OSError as error:  # the lease expires later
            self._counts.report(
                TRANSPORT_DISCOVERY_FAILED, "registry_failed", str(self.folder), detail=str(error.strerror)
            )

    def _run(self) -> None:
        pause, stamp, scanned = self._poll_s, 0, 0.0
        backoff = Backoff(2 * self._poll_s, PAUSE_MAX_S)
        while not self._ended:
            self._wake.wait(pause)
            woken = self._wake.is_set()
            self._wake.clear()
            try:
                self._beat()
                now, before = time.monotonic(), stamp
                stamp = self.folder.stat().st_mtime_ns
                fresh = time.time() - stamp / 1e9 < FRESH_S
                if woken or fresh or stamp != before or now - scanned >= FULL_SCAN_S:
                    scanned = now
                    self._notify(self._nodes())
                pause, self._problem = self._poll_s, ""
                backoff.reset()
            except OSError as error:
                self._problem = f"{type(error).__name__}: {error.strerror}"
                self._counts.report(
                    TRANSPORT_DISCOVERY_FAILED, "registry_failed", str(self.folder), detail=self._problem
                )
                pause = backoff.next()

    def _beat(self) -> None:
        with self._lock:
            if self._own is not None and not self._ended and time.monotonic() >= self._beat_due:
                self._own = self._own.renewed(self._own.node)
                self._write(self._own)

    def _nodes(self) -> Nodes:
        return {lease.node.node: lease.node for lease in self.leases()}

    def _read(self, entry: os.DirEntry[str]) -> RegistryLease | None:
        if not entry.name.endswith((SUFFIX, DRAFT)):
            return None
        try:
            status = entry.stat(follow_symlinks=False)
            if entry.name.endswith(DRAFT):
                if time.time() - status.st_mtime > DRAFT_S:  # its writer was killed
                    self._reap(entry.name)
                return None
            if not stat.S_ISREG(status.st_mode) or status.st_size > LEASE_BYTES_MAX:
                return None
            version = status.st_ino, status.st_mtime_ns, status.st_size
            known = self._known.get(entry.name)
            if known is None or known[0] != version:
                known = version, decode_lease(Path(entry.path).read_bytes())
                self._known[entry.name] = known
                if known[1] is None:
                    self._counts.report(TRANSPORT_DISCOVERY_FAILED, "registry_record_invalid", entry.name)
        except FileNotFoundError:
            return None  # it was just removed
        except OSError as error:  # the other files are read nevertheless
            self._report_file(entry.name, error)
            return None
        return known[1]

    def _reap(self, name: str) -> None:
        try:
            (self.folder / name).unlink(missing_ok=True)
            self._counts.add("leases_expired")
        except OSError as error:  # such as a folder of that name
            self._report_file(name, error)

    def _report_file(self, name: str, error: OSError) -> None:
        self._counts.report(
            TRANSPORT_DISCOVERY_FAILED,
            "registry_record_invalid",
            name,
            detail=f"{type(error).__name__}: {error.strerror}",
        )

    def _write(self, lease: RegistryLease) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(lease)
        draft = path.with_suffix(DRAFT)
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(encode_lease(lease))
        draft.replace(path)
        self._beat_due = time.monotonic() + self._lease_s / 3

    def _path(self, lease: RegistryLease) -> Path:
        return self.folder / f"{lease.node.node}{SUFFIX}"


def _private_folder(given: Path | None) -> Path:
    """Return the folder, created if it is missing. Other users must not write to it: it says where we connect."""
    if given is not None:
        folder = given
    else:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        folder = Path(runtime, "zbus-zmq") if runtime else Path(tempfile.gettempdir(), f"zbus-zmq-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigInvalid("registry", f"{folder}: {error.strerror}") from error
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o002:
        raise ConfigInvalid("registry", f"{folder} belongs to another user, or every user may write to it")
    return folder


if TYPE_CHECKING:
    _port: type[Discovery] = FileRegistry
