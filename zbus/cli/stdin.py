"""Stdin, read as a whole or line by line.

It is read by file descriptor, because Python's buffer would delay lines.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

STDIN = 0
CHUNK_BYTES = 1 << 20


def read_all(limit_bytes: int) -> bytes:
    """Read stdin to EOF, or at most `limit_bytes`. A result of exactly `limit_bytes` means the input was too large."""
    found = bytearray()
    while len(found) < limit_bytes:
        chunk = os.read(STDIN, min(CHUNK_BYTES, limit_bytes - len(found)))
        if not chunk:
            break
        found += chunk
    return bytes(found)


async def read_lines(limit_bytes: int) -> AsyncIterator[list[bytes]]:
    """Yield the lines that have arrived, without line ends. A line over the limit is cut to one byte more than that."""
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
    """Return the next bytes of stdin. It waits on the event loop, so that Ctrl-C cancels it."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(STDIN, ready.set)
    except PermissionError:
        return os.read(STDIN, CHUNK_BYTES)  # a regular file, which the loop cannot watch and which never blocks
    try:
        await ready.wait()
        return os.read(STDIN, CHUNK_BYTES)
    finally:
        loop.remove_reader(STDIN)
