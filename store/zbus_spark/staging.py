"""Staged rows: checked on the executors and stored as Arrow files until the driver commits.

    app.db-staging/                      or below the folder of the option `staging`
        SCOPE-PID-STARTED-RANDOM/        one write, or one run of a query, by its driver
            *.arrow                      the rows of one task: key, payload, headers as the log stores them

A file is synced before a commit message names it. A folder is removed by its commit or abort. The folders of a killed
driver are removed when the next write to the same log begins: immediately if that driver ran on this machine and has
ended, otherwise after a day without changes. A folder that an unfinished commit needs is never removed.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from zbus.errors import ConfigInvalid, EventInvalid, EventTooLarge, LogError
from zbus.headers import TEXT, encode_headers
from zbus.keys import check_key
from zbus.ports.log import Row
from zbus.util.atomic_file import sync
from zbus.util.process import boot_id, is_alive, pid_namespace, started_at

CHUNK_ROWS = 1000
ABANDONED_S = 86_400.0  # time without changes after which a folder of another machine counts as abandoned
_STAGED = pa.schema(
    [pa.field("key", pa.string(), False), pa.field("payload", pa.binary(), False), pa.field("headers", pa.binary())]
)


class StagedPart(NamedTuple):
    """The staged rows of one task."""

    path: str
    rows: int
    host: str  # the host that wrote it


def base_folder(log: Path, staging: str | None) -> Path:
    """Return the folder for staged rows of a log: beside it, or below a folder that other logs may use too."""
    if staging is None:
        return Path(f"{log}-staging")
    return Path(staging).expanduser().absolute() / _digest(f"{platform.node()}:{log}")


def run_folder(base: Path) -> Path:
    """Return the folder for the rows of one write. Its name identifies the driver process that began it."""
    driver = _driver()
    return base / f"{_pid_scope()}-{driver}-{started_at(driver)}-{secrets.token_hex(4)}"


def stage(
    folder: Path, batches: Iterable[pa.RecordBatch], key: str | None, payload_bytes_max: int
) -> StagedPart | None:
    """Check rows and write them to a new file. Returns None if there are no rows.

    Raises `EventInvalid`, `EventTooLarge` or `KeyInvalid` if a row is invalid, and `ConfigInvalid` if the folder cannot
    be written.
    """
    host, written = platform.node(), 0
    file: Path | None = None
    writer: pa.RecordBatchFileWriter | None = None
    try:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            checked = _checked(batch, key, payload_bytes_max)
            if writer is None:
                file = folder / f"{secrets.token_hex(8)}.arrow"
                writer = _create(file)
            writer.write_batch(checked)
            written += batch.num_rows
        if writer is None or file is None:
            return None
        writer.close()
        sync(file)
        sync(folder)
        return StagedPart(str(file), written, host)
    except BaseException as error:
        if writer is not None and file is not None:
            with suppress(Exception):
                writer.close()
            with suppress(OSError):
                file.unlink(missing_ok=True)
                folder.rmdir()  # fails while other tasks have files in it
        if isinstance(error, OSError):
            reason = f"{folder} cannot be written on {host} ({error.strerror or error}); nothing was published"
            raise ConfigInvalid(
                "staging", f"{reason}. Name a folder that the driver and the executors share"
            ) from error
        raise


def _create(file: Path) -> pa.RecordBatchFileWriter:
    for _ in range(10):  # another write may remove the empty parent folder in between
        with suppress(FileNotFoundError):
            file.parent.mkdir(parents=True, exist_ok=True)
            return pa.ipc.new_file(file, _STAGED)
    raise FileNotFoundError(2, "the folder is removed repeatedly", str(file.parent))


def check_files(parts: Sequence[StagedPart]) -> None:
    """Raise `LogError` if a staged file is not visible on this host."""
    for part in parts:
        if not Path(part.path).is_file():
            raise LogError(
                f"{part.path}, staged on {part.host}, is missing on the driver ({platform.node()}). Nothing was "
                "published. With the option `staging`, name a folder that the driver and the executors share"
            )


def _checked(batch: pa.RecordBatch, key: str | None, payload_bytes_max: int) -> pa.RecordBatch:
    """Return the rows as they are staged. Raises an error if a row is invalid."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise EventInvalid(f"a row has text that is not UTF-8 ({error}); nothing was published") from error
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if key is not None:
        columns["key"] = pa.repeat(key, batch.num_rows)
    for name in ("key", "payload"):
        if columns[name].null_count:
            raise EventInvalid(f"{columns[name].null_count} rows have no {name}; nothing was published")
    for each in pc.unique(columns["key"]).to_pylist():
        check_key(each)
    payload = columns["payload"]
    largest = pc.max(pc.binary_length(payload)).as_py()
    if largest > payload_bytes_max:
        raise EventTooLarge("payload", largest, payload_bytes_max)
    content_type = TEXT if pa.types.is_string(payload.type) or pa.types.is_large_string(payload.type) else None
    headers = _encoded(columns.get("headers"), content_type, batch.num_rows)
    return pa.RecordBatch.from_arrays(
        [columns["key"].cast(pa.string()), payload.cast(pa.binary()), headers], schema=_STAGED
    )


def _encoded(headers: pa.Array | None, content_type: str | None, rows: int) -> pa.Array:
    if headers is None:
        encoded = encode_headers(None, None, content_type)
        return pa.nulls(rows, pa.binary()) if encoded is None else pa.repeat(encoded, rows)
    known: dict[tuple[tuple[str, str], ...], bytes | None] = {}  # headers repeat, so each is encoded once
    found: list[bytes | None] = []
    for each in headers.to_pylist():
        pairs = tuple(each or ())
        if pairs not in known:
            known[pairs] = encode_headers(dict(pairs), None, content_type)
        found.append(known[pairs])
    return pa.array(found, pa.binary())


def rows_of(parts: Sequence[StagedPart], publisher_id: int, first_sequence: int) -> Iterator[list[Row]]:
    """Yield the rows of staged files in order, with their identities, in chunks."""
    sequence = first_sequence
    for part in parts:
        end = sequence + part.rows
        try:
            with pa.memory_map(part.path) as source, pa.ipc.open_file(source) as file:
                for number in range(file.num_record_batches):
                    batch = file.get_batch(number)
                    for start in range(0, batch.num_rows, CHUNK_ROWS):
                        columns = [column.to_pylist() for column in batch.slice(start, CHUNK_ROWS).columns]
                        now = time.time_ns()
                        yield [
                            Row(publisher_id, sequence + place, now, key, payload, headers)
                            for place, (key, payload, headers) in enumerate(zip(*columns, strict=True))
                        ]
                        sequence += len(columns[0])
        except (OSError, pa.ArrowInvalid) as error:
            raise LogError(f"{part.path} cannot be read ({error}); not all of its rows were published") from error
        if sequence != end:
            raise LogError(f"{part.path} has {sequence - end + part.rows} rows, but {part.rows} were staged")


def remove(folders: Iterable[Path]) -> None:
    """Remove folders of staged rows, and their parent folders if empty. A task that still writes there fails."""
    for folder in set(folders):
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()


def remove_abandoned_folders(base: Path, needed: Iterable[Path]) -> None:
    """Remove the folders of killed drivers, except those in `needed`."""
    if not base.is_dir():
        return
    kept = set(needed)
    remove(folder for folder in base.iterdir() if folder.is_dir() and folder not in kept and _is_abandoned(folder))


def _is_abandoned(folder: Path) -> bool:
    try:
        scope, pid, started, _ = folder.name.split("-")
        if scope == _pid_scope():
            return not is_alive(int(pid), int(started))
        return time.time() - max(each.stat().st_mtime for each in (folder, *folder.iterdir())) > ABANDONED_S
    except (ValueError, OSError):
        return False  # not a folder of this sink, or another process is changing it


def _pid_scope() -> str:
    """Return an id of the scope in which process ids are unique: one boot of a machine, or one container."""
    boot, namespace = boot_id(), pid_namespace()
    return _digest(f"{boot}\n{namespace}" if boot and namespace else platform.node())


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=6).hexdigest()


def _driver() -> int:
    """Return the process id of the driver's JVM. Short-lived processes below it plan and commit."""
    with suppress(OSError, ValueError, IndexError):
        pid = os.getppid()
        while pid > 1:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            if name == "java":
                return pid
            pid = int(rest.split()[1])
    return os.getppid()
