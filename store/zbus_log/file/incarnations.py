"""The incarnations of a log, in its own file: one row for each opening by an owner."""

from __future__ import annotations

import secrets
import socket
import time

import msgspec
from sqlalchemy import Connection

from zbus.ports.lineage import Incarnation, Lineage

from .tables import LINEAGE_SINCE, file_version

KEPT_MAX = 10_000
BEFORE = Lineage((Incarnation(0, 1),))  # of a file that an owner of this version has not opened yet

_decode = msgspec.json.Decoder(list[Incarnation]).decode


def read_lineage(connection: Connection) -> Lineage:
    """Return the incarnations that are in the file."""
    found = () if file_version(connection) < LINEAGE_SINCE else read_incarnations(connection)
    return Lineage(found) if found else BEFORE


def read_incarnations(connection: Connection) -> tuple[Incarnation, ...]:
    """Return the incarnations in a file of this version, oldest first."""
    found = connection.exec_driver_sql(
        "SELECT json_group_array(json_array(id, first, started_at, host) ORDER BY ordinal) FROM incarnations"
    ).scalar_one()
    return tuple(_decode(found))


def extended(incarnations: tuple[Incarnation, ...], begun: Incarnation) -> Lineage:
    """Return the newest incarnations and one more."""
    return Lineage((*incarnations[1 - KEPT_MAX :], begun))


def new_incarnation(first: int) -> Incarnation:
    """Return an incarnation with a random id that begins now, on this host."""
    return Incarnation(secrets.randbelow((1 << 62) - 1) + 1, first, time.time_ns(), socket.gethostname())


def add_incarnation(connection: Connection, incarnation: Incarnation) -> None:
    """Store an incarnation as the current one, and forget those beyond `KEPT_MAX`. Call it in a transaction."""
    connection.exec_driver_sql(
        "INSERT INTO incarnations (ordinal, id, first, started_at, host)"
        " SELECT ifnull(max(ordinal), 0) + 1, ?, ?, ?, ? FROM incarnations",
        tuple(incarnation),
    )
    connection.exec_driver_sql(
        "DELETE FROM incarnations WHERE ordinal <= (SELECT max(ordinal) FROM incarnations) - ?", (KEPT_MAX,)
    )
