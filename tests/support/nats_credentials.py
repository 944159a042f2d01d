"""Throw-away logins for a nats-server: nkeys, an operator's JWTs and a creds file, and TLS certificates."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import nkeys


class Key:
    """An nkey of one kind: user, account or operator."""

    def __init__(self, kind: int) -> None:
        self.seed = bytes(nkeys.encode_seed(os.urandom(32), kind)).decode()
        self.public = nkeys.from_seed(bytearray(self.seed.encode())).public_key.decode()

    def sign(self, data: bytes) -> bytes:
        return bytes(nkeys.from_seed(bytearray(self.seed.encode())).sign(data))


def user_key() -> Key:
    return Key(nkeys.PREFIX_BYTE_USER)


def operator_config(creds: Path) -> str:
    """Write a creds file for one user, and return the configuration of a server that knows its operator."""
    operator, account, user = Key(nkeys.PREFIX_BYTE_OPERATOR), Key(nkeys.PREFIX_BYTE_ACCOUNT), user_key()
    operator_jwt = _jwt(operator, operator, {"type": "operator", "version": 2})
    limits = {"subs": -1, "data": -1, "payload": -1, "conn": -1, "imports": -1, "exports": -1, "wildcards": True}
    account_jwt = _jwt(operator, account, {"type": "account", "version": 2, "limits": {**limits, "leaf": -1}})
    user_jwt = _jwt(account, user, {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1})
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
    return f"operator: {operator_jwt}\nresolver: MEMORY\nresolver_preload: {{ {account.public}: {account_jwt} }}\n"


def _jwt(issuer: Key, subject: Key, claims: dict[str, Any]) -> str:
    body = {"iat": int(time.time()), "iss": issuer.public, "name": "test", "sub": subject.public, "nats": claims}
    digest = hashlib.sha256(json.dumps(body).encode()).digest()
    body["jti"] = base64.b32encode(digest).decode().rstrip("=")
    parts = [_text(json.dumps(each).encode()) for each in ({"typ": "JWT", "alg": "ed25519-nkey"}, body)]
    return ".".join([*parts, _text(issuer.sign(".".join(parts).encode()))])


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def certificates(directory: Path) -> Path:
    """An authority (ca.pem), a server of it for 127.0.0.1 (server.pem, .key) and a client (client.pem, .key)."""
    directory.mkdir(parents=True, exist_ok=True)
    _openssl(directory, "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=zbus-test-ca -keyout ca.key -out ca.pem")
    for name, extension in (("server", "subjectAltName=IP:127.0.0.1"), ("client", "extendedKeyUsage=clientAuth")):
        (directory / f"{name}.ext").write_text(extension)
        _openssl(directory, f"req -newkey rsa:2048 -nodes -subj /CN=zbus-{name} -keyout {name}.key -out {name}.csr")
        _openssl(
            directory,
            f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile {name}.ext "
            f"-out {name}.pem",
        )
    return directory


def tls_config(directory: Path, *, verify: bool = False) -> str:
    """The TLS part of a server's configuration."""
    return (
        f'tls {{ cert_file: "{directory}/server.pem", key_file: "{directory}/server.key", '
        f'ca_file: "{directory}/ca.pem", verify: {str(verify).lower()} }}\n'
    )


def _openssl(directory: Path, arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments.split()], cwd=directory, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
