"""CURVE: authentication and encryption by public keys.

A node has one pair of keys and a folder with the public keys of its peers. Both ends check: the key of a peer that
connects must be in the folder, and so must the key of a node that we connect to. Incoming connections are checked on
the fabric's own thread. The folder is read again when it changes, so a key can be revoked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.utils.z85 import decode, encode

from zbus.errors import ConfigInvalid
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_INPUT_REJECTED
from zbus_zmq.address.options import ZmqOptions

from .receive import received

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
Socket = zmq.Socket[bytes]


class Keys:
    """The keys of a node. Neither shown nor pickled."""

    def __init__(self, secret: Path, allow: Path, counts: Counters) -> None:
        self.public, self._secret = _load_pair(secret)
        self._folder, self._counts = allow, counts
        self._stamp = -1
        self._allowed: frozenset[bytes] = frozenset()
        self._read_folder()

    def __repr__(self) -> str:
        return f"Keys(public={self.public.decode()!r})"

    def __reduce__(self) -> str:
        raise TypeError("keys are not pickled")

    def equip(self, socket: Socket, *, server: bool) -> None:
        """Set our keys on a socket that binds or connects."""
        socket.set(zmq.CURVE_PUBLICKEY, self.public)
        socket.set(zmq.CURVE_SECRETKEY, self._secret)
        if server:
            socket.set(zmq.CURVE_SERVER, 1)
            socket.set(zmq.ZAP_DOMAIN, b"zbus")

    def permits(self, public: bytes) -> bool:
        """Return whether a public key (Z85) is permitted."""
        self._read_folder()
        return public in self._allowed

    def _read_folder(self) -> None:
        try:
            stamp = self._folder.stat().st_mtime_ns
            if stamp == self._stamp:
                return
            found = {_load_public(path) for path in sorted(self._folder.glob("*.key"))}
        except OSError as error:
            # Without the folder every peer is rejected, to be safe.
            self._allowed, self._stamp = frozenset(), -1
            self._counts.report(
                "CURVE_FAILED", "curve_folder_unreadable", str(self._folder), detail=error.strerror or ""
            )
            return
        self._allowed, self._stamp = frozenset(found - {b""}), stamp


def open_keys(options: ZmqOptions, counts: Counters) -> Keys | None:
    """Return the keys in the options, or None without CURVE. Raises `ConfigInvalid` if they cannot be read."""
    if options.curve_secret is None or options.curve_allow is None:
        return None
    if not options.curve_allow.is_dir():
        raise ConfigInvalid("curve_allow", f"{options.curve_allow} is not a folder")
    return Keys(options.curve_secret, options.curve_allow, counts)


def make_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a new pair in a folder: the file to give away, and the secret one, which only the user can read."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (folder / f"{name}.key_secret").exists():
        raise ConfigInvalid("name", f"{folder / name}.key_secret exists; keys are never overwritten")
    before = os.umask(0o077)
    try:
        public, secret = create_certificates(folder, name)
    finally:
        os.umask(before)
    return Path(public), Path(secret)


def read_public(path: Path, field: str) -> bytes:
    """Return the public key of a file, in Z85."""
    try:
        found = _load_public(path)
    except OSError as error:
        raise ConfigInvalid(field, f"{path}: {error.strerror}") from None
    if not found:
        raise ConfigInvalid(field, f"{path} does not contain a public key")
    return found


def is_public_key(text: str) -> bool:
    """Return whether a text is a well-formed key. libzmq would accept any text and fail later."""
    try:
        return len(text) == 40 and len(decode(text.encode("ascii"))) == 32
    except (ValueError, KeyError, UnicodeEncodeError):
        return False


class ZapAuthenticator:
    """Decides for libzmq whether a peer may connect (ZAP, RFC 27), on the thread of its socket."""

    def __init__(self, context: zmq.Context[Socket], keys: Keys, counts: Counters) -> None:
        self._keys, self._counts = keys, counts
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def on_readable(self) -> None:
        """Accept peers whose key is allowed, and reject all others."""
        for frames in received(self.socket):
            parts = [frame.bytes for frame in frames]
            if len(parts) < 4:
                continue
            route, empty, version, request, *rest = parts
            known = self._is_known(version, rest)
            status = [b"200", b"OK"] if known else [b"400", b"unknown key"]
            self.socket.send_multipart([route, empty, b"1.0", request, *status, b"", b""])

    def _is_known(self, version: bytes, rest: list[bytes]) -> bool:
        # domain, address, routing id, mechanism, credentials
        if version != b"1.0" or len(rest) != 5 or rest[3] != b"CURVE" or len(rest[4]) != 32:
            self._counts.report(TRANSPORT_INPUT_REJECTED, "curve_rejected", "a request that is not for CURVE")
            return False
        if self._keys.permits(encode(rest[4])):
            return True
        self._counts.report(TRANSPORT_INPUT_REJECTED, "curve_rejected", rest[1].decode("ascii", "replace"))
        return False


def attach_authenticator(
    context: zmq.Context[Socket],
    keys: Keys,
    counts: Counters,
    on_readable: Callable[[Socket, Callable[[], None]], None],
) -> None:
    """Check every connection to a CURVE socket of a context."""
    authenticator = ZapAuthenticator(context, keys, counts)
    on_readable(authenticator.socket, authenticator.on_readable)


def _load_pair(path: Path) -> tuple[bytes, bytes]:
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigInvalid("curve_secret", f"{path} can be read by other users: chmod 600 it")
        public, secret = load_certificate(path)
    except OSError as error:
        raise ConfigInvalid("curve_secret", f"{path}: {error.strerror}") from None
    except ValueError:
        raise ConfigInvalid("curve_secret", f"{path} is not a key file") from None
    if secret is None or not is_public_key(public.decode("ascii", "replace")) or len(secret) != 40:
        raise ConfigInvalid("curve_secret", f"{path} does not contain a secret key")
    return public, secret


def _load_public(path: Path) -> bytes:
    """Return the key in a file, or nothing if there is no key in it."""
    try:
        public, _ = load_certificate(path)
    except ValueError:
        return b""
    return public if is_public_key(public.decode("ascii", "replace")) else b""
