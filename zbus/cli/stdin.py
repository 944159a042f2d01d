"""Reading stdin, whole or line by line. By descriptor, so that lines are published as they come."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

STDIN = 0
CHUNK_BYTES = 1 << 20


def read_all(limit_bytes: int) -> bytes:
    """Everything to the end, or the first `limit_bytes`: who gets that many knows that it is too much."""
    found = bytearray()
    while len(found) < limit_bytes:
        chunk = os.read(STDIN, min(CHUNK_BYTES, limit_bytes - len(found)))
        if not chunk:
            break
        found += chunk
    return bytes(found)


async def read_lines(limit_bytes: int) -> AsyncIterator[list[bytes]]:
    """Lines without their ends, as many at a time as are there. A line over the limit comes cut, and too long."""
    rest = b""
    while chunk := await _read_chunk():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > limit_bytes:
            lines.append(rest[: limit_bytes + 1])
        if lines:
            yield [line.removesuffix(b"\r") for line in lines]
    if rest:
        yield [rest]


async def _read_chunk() -> bytes:
    """What is there to read; waits on the loop, so that Ctrl-C ends it."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(STDIN, ready.set)
    except PermissionError:
        return os.read(STDIN, CHUNK_BYTES)  # a regular file: it never waits, and cannot be waited for
    try:
        await ready.wait()
        return os.read(STDIN, CHUNK_BYTES)
    finally:
        loop.remove_reader(STDIN)
