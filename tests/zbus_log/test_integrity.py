"""Damage that SQLite does not notice: a reader gets an error or the right events, never fewer or others."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from cold_support import epoch_of, write_segment
from log_support import append, ask, wait_until

from zbus import BusConfig, CursorError, Event, EventCorrupt, LogDamaged
from zbus.errors import LogError
from zbus.keys import KeySet
from zbus.ports.log import Row, Span
from zbus_log import Cold, Rules, SqliteLog, open_log, verify
from zbus_log.file import sqlite_driver
from zbus_log.file.manifest import ColdDamaged
from zbus_log.file.tables import BLOCK

SIZE = 2 * BLOCK + 300  # two sealed blocks, and a tail
KEYS = 10
WHOLE = Span()
EVERY, SOME, ONE = KeySet.all(), KeySet(("k/1", "k/2", "k/3", "k/4")), KeySet(("k/7",))


def row(sequence: int) -> Row:
    return Row(1, sequence, sequence, f"k/{sequence % KEYS}", b"payload-%06d" % sequence, None)


def change(path: Path | str, statement: str) -> None:
    """Change a file behind its back, as a bad disk would."""
    connection = sqlite_driver.connect(str(path))
    for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute(statement)
    assert connection.changes() > 0
    connection.close()


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed log, for tests to copy."""
    path = tmp_path_factory.mktemp("healthy") / "app.db"
    log = open_log(BusConfig(log=str(path)))
    append(log, [row(n) for n in range(SIZE)])
    wait_until(lambda: ask(path, "SELECT count(*) FROM blocks") >= 2)
    lease = log.cursors.claim("worker", ["**"], 0)
    log.cursors.advance("worker", lease.token, 700)
    log.cursors.release("worker", lease.token)
    log.close(5.0)
    return path


@pytest.fixture
def path(healthy: Path, tmp_path: Path) -> Path:
    for suffix in ("", "-head", "-cursors"):
        shutil.copyfile(f"{healthy}{suffix}", f"{tmp_path / 'app.db'}{suffix}")
    return tmp_path / "app.db"


@pytest.fixture(params=[True, False], ids=["reader", "owner"])
def read_only(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def read(path: Path, keys: KeySet = EVERY, read_only: bool = True, span: Span = WHOLE) -> list[Event]:
    """Return all events of some keys. Raises the error that ends them early."""
    log = SqliteLog(str(path), read_only=read_only)
    try:
        return list(_events(log, keys, log.narrow(span)))
    finally:
        log.close(5.0)


def _events(log: SqliteLog, keys: KeySet, span: Span) -> Iterator[Event]:
    assert span.until is not None
    while span.after < span.until:
        page = log.read(keys, span, 1000)
        events, error, _ = page.events()
        yield from events
        if error is not None:
            raise error
        span = span._replace(after=page.covered)


def expected(keys: KeySet) -> list[bytes]:
    return [row(n).payload for n in range(SIZE) if row(n).key in keys]


# The table of keys.


@pytest.mark.parametrize("keys", [EVERY, SOME, ONE], ids=["all", "some", "one"])
def test_an_event_is_never_handed_out_under_another_key(path: Path, keys: KeySet) -> None:
    change(path, "UPDATE keys SET key = 'k/7x' WHERE key = 'k/7'")
    change(path, "UPDATE keys SET key = 'k/7' WHERE key = 'k/3'")

    with pytest.raises(EventCorrupt, match="checksum"):
        read(path, keys)


def test_a_key_that_is_gone_from_the_index_of_keys_is_still_found(path: Path) -> None:
    """Keys are matched by an index, which is a second copy of their names."""
    data = path.read_bytes()
    names = [at for at in range(len(data)) if data.startswith(b"k/7", at)]
    index = max(names, key=lambda at: data[at + 3])  # in the index, the id follows the name
    path.write_bytes(data[:index] + b"k/~" + data[index + 3 :])
    assert ask(path, "SELECT count(*) FROM keys NOT INDEXED WHERE key = 'k/7'") == 1

    try:
        found = [event.payload for event in read(path, ONE)]
    except LogError:
        return
    assert found == expected(ONE)


# Events that are missing.


@pytest.mark.parametrize(
    "keys", [EVERY, KeySet(("k/2", "k/3", "k/4", "k/5")), KeySet(("k/4",))], ids=["all", "some", "one"]
)
@pytest.mark.parametrize("sequence", [14, BLOCK + 8, SIZE - 28])  # of the key k/4
def test_an_event_that_is_missing_is_an_error_that_names_it(path: Path, keys: KeySet, sequence: int) -> None:
    sequence -= sequence % KEYS - 4
    change(path, f"DELETE FROM events WHERE offset = {sequence + 1}")
    log = SqliteLog(str(path), read_only=True)
    try:
        got: list[bytes] = []
        with pytest.raises(EventCorrupt, match="is missing") as caught:
            got.extend(event.payload for event in _events(log, keys, Span(0, SIZE)))
        assert caught.value.offset == sequence + 1
        page = log.read(keys, Span(sequence - 5, SIZE), 50)
        events, error, skipped = page.events(skip_corrupt=True)
        assert (error, skipped) == (None, 1)
        assert events[-1].offset > sequence
    finally:
        log.close(5.0)


def test_events_that_were_accepted_as_lost_are_not_missing(path: Path) -> None:
    change(path, f"DELETE FROM events WHERE offset > {SIZE - 10}")
    log = open_log(BusConfig(log=str(path), accept_loss=True))
    append(log, [row(SIZE)])
    log.close(5.0)

    assert len(read(path)) == SIZE - 9
    assert len(read(path, ONE)) == len(expected(ONE)) - 1


def test_a_low_water_mark_that_is_too_high_is_an_error(path: Path, read_only: bool) -> None:
    change(path, "UPDATE state SET low_water = 4000")

    with pytest.raises(LogDamaged, match="state"):
        read(path, read_only=read_only)


# The index of sealed blocks.


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM by_key WHERE key = (SELECT id FROM keys WHERE key = 'k/7')",
        "UPDATE by_key SET key = 999 WHERE key = (SELECT id FROM keys WHERE key = 'k/7')",
        "UPDATE by_key SET offsets = '[8]' WHERE key = (SELECT id FROM keys WHERE key = 'k/7') AND block = 0",
        "UPDATE by_key SET offsets = replace(offsets, '8,', '9,')",
        "DELETE FROM blocks WHERE block = 0",
        "UPDATE blocks SET events = 3",
        "UPDATE blocks SET index_checksum = 3 WHERE block = 1",
    ],
)
@pytest.mark.parametrize("keys", [SOME, ONE], ids=["some", "one"])
def test_a_damaged_index_hides_no_event(path: Path, statement: str, keys: KeySet) -> None:
    change(path, statement)

    assert [event.payload for event in read(path, keys)] == expected(keys)
    assert verify(str(path)).problems


def test_an_event_whose_key_was_damaged_before_it_was_sealed_is_not_hidden(path: Path) -> None:
    change(path, f"UPDATE events SET key = (SELECT id FROM keys WHERE key = 'k/3') WHERE offset = {SIZE - 2}")
    sequence = SIZE - 3
    log = open_log(BusConfig(log=str(path)))
    append(log, [row(SIZE + n) for n in range(2 * BLOCK)])
    wait_until(lambda: ask(path, "SELECT count(*) FROM blocks") >= 3)
    log.close(5.0)

    with pytest.raises(EventCorrupt, match="checksum"):
        read(path, KeySet((row(sequence).key,)))


@pytest.mark.parametrize("time", [10, BLOCK + 100])
def test_damaged_times_of_a_block_hide_no_event(path: Path, time: int) -> None:
    span = Span(0, None, time, time + 20)
    assert [event.published_at for event in read(path, span=span)] == list(range(time, time + 21))
    for statement in (
        f"UPDATE blocks SET published_max = 5 WHERE block = {time // BLOCK}",
        f"UPDATE events SET published_at = 0 WHERE published_at = {time}",
    ):
        change(path, statement)
        with pytest.raises(LogError):
            read(path, span=span)


# Comparison with the head record.


def test_a_log_that_ends_before_its_head_record_is_refused(path: Path, read_only: bool) -> None:
    change(path, f"DELETE FROM events WHERE offset > {SIZE - 10}")

    with pytest.raises(LogDamaged) as caught:
        read(path, read_only=read_only)
    assert caught.value.missing == (SIZE - 9, SIZE)
    assert f"ends at offset {SIZE - 10}, but {SIZE} was acknowledged" in str(caught.value)


def test_a_log_without_its_head_record_or_with_another_one_is_refused(path: Path, tmp_path: Path) -> None:
    head = Path(f"{path}-head")
    (tmp_path / "other").mkdir()
    log = SqliteLog(str(tmp_path / "other" / "app.db"))
    append(log, [row(1)])
    log.close(5.0)
    shutil.copyfile(tmp_path / "other" / "app.db-head", head)
    with pytest.raises(LogDamaged, match="a different log"):
        read(path)
    head.unlink()
    with pytest.raises(LogDamaged, match="no head record"):
        read(path)


def test_a_reader_beside_an_owner_that_writes_is_never_refused(path: Path) -> None:
    log, stop, sequences = open_log(BusConfig(log=str(path))), threading.Event(), count(SIZE)

    def write() -> None:
        while not stop.is_set():
            append(log, [row(next(sequences)) for _ in range(5)])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(100):
            SqliteLog(str(path), read_only=True).close(5.0)
    finally:
        stop.set()
        writer.join(20)
        log.close(5.0)


# Cursors.


def test_a_damaged_position_is_an_error_that_says_what_to_do(path: Path) -> None:
    change(f"{path}-cursors", "UPDATE cursors SET offset = 701")
    log = open_log(BusConfig(log=str(path)))
    try:
        with pytest.raises(CursorError, match=r"is damaged.*--reset worker --to"):
            log.cursors.claim("worker", ["**"], 0)
        with pytest.raises(CursorError, match="worker"):
            log.cursors.list()
        assert any("worker" in problem for problem in verify(str(path)).problems)
        log.cursors.reset("worker", 500)
        assert log.cursors.claim("worker", ["**"], 0).offset == 500
    finally:
        log.close(5.0)
    assert verify(str(path)).problems == []


def test_a_position_without_a_checksum_is_accepted_and_gets_one(path: Path) -> None:
    change(f"{path}-cursors", "UPDATE cursors SET checksum = NULL")
    log = open_log(BusConfig(log=str(path)))
    lease = log.cursors.claim("worker", ["**"], 0)
    log.close(5.0)

    assert lease.offset == 700
    assert ask(f"{path}-cursors", "SELECT checksum FROM cursors") is not None


@pytest.mark.parametrize("kept", [0, 5000])
def test_a_cursor_file_that_was_cut_is_an_error(path: Path, kept: int) -> None:
    cursors = Path(f"{path}-cursors")
    log = open_log(BusConfig(log=str(path)))
    log.cursors.release("worker", log.cursors.claim("worker", ["**"], 0).token)
    log.close(5.0)
    cursors.write_bytes(cursors.read_bytes()[:kept])
    log = open_log(BusConfig(log=str(path)))
    try:
        with pytest.raises(LogError, match="cursors"):
            log.cursors.claim("worker", ["**"], 0)
    finally:
        log.close(5.0)


@pytest.mark.parametrize("statement", ["DELETE FROM cursors", "UPDATE cursors SET offset = 600, checksum = NULL"])
def test_a_position_that_is_gone_or_older_than_the_one_that_was_stored_is_an_error(path: Path, statement: str) -> None:
    log = open_log(BusConfig(log=str(path)))
    log.cursors.release("worker", log.cursors.claim("worker", ["**"], 0).token)
    log.close(5.0)
    change(f"{path}-cursors", statement)
    log = open_log(BusConfig(log=str(path)))
    try:
        for use in (log.cursors.list, log.cursors.lowest, lambda: log.cursors.claim("worker", ["**"], 0)):
            with pytest.raises(CursorError, match=r"700 was stored.*--reset worker --to"):
                use()
        log.cursors.reset("worker", 300)
        assert log.cursors.claim("worker", ["**"], 0).offset == 300
    finally:
        log.close(5.0)


def test_a_cursor_that_is_gone_can_be_deleted(path: Path) -> None:
    log = open_log(BusConfig(log=str(path)))
    try:
        log.cursors.release("worker", log.cursors.claim("worker", ["**"], 0).token)
        change(f"{path}-cursors", "DELETE FROM cursors")
        log.cursors.delete("worker")
        assert log.cursors.claim("worker", ["**"], 5).offset == 5
    finally:
        log.close(5.0)


# The cold tier.


@pytest.fixture
def tiered(path: Path) -> Path:
    """A log whose oldest events are in a cold tier."""
    segment = write_segment(path, f"{path}-cold", 1, BLOCK)
    Cold(f"{path}-cold").add([segment], epoch_of(path))
    log = open_log(BusConfig(log=str(path)))
    log.prune(Rules(until=BLOCK, ignore_cursors=True, offloaded=True))
    log.close(5.0)
    assert [event.payload for event in read(path)] == expected(EVERY)
    return path


def test_a_manifest_that_does_not_match_its_checksum_is_named(tiered: Path) -> None:
    manifest = Path(f"{tiered}-cold/manifest.json")
    text = manifest.read_text()
    assert f'"published_max": {BLOCK - 1}' in text
    manifest.write_text(text.replace(f'"published_max": {BLOCK - 1}', '"published_max": 7'))

    with pytest.raises(ColdDamaged, match=r"manifest\.json: the manifest does not match its checksum"):
        read(tiered)
    assert any("manifest.json" in problem for problem in verify(str(tiered)).problems)


def test_a_manifest_without_a_checksum_is_accepted(tiered: Path) -> None:
    manifest = Path(f"{tiered}-cold/manifest.json")
    text, _, rest = manifest.read_text().rpartition(',\n "checksum"')
    manifest.write_text(text + "\n}")

    assert rest
    assert [event.payload for event in read(tiered)] == expected(EVERY)


def test_a_missing_tier_is_named(tiered: Path, read_only: bool) -> None:
    assert verify(str(tiered)).problems == []
    shutil.move(f"{tiered}-cold", f"{tiered}-elsewhere")

    for span in (Span(), Span(500), Span(0, None, 5)):
        with pytest.raises(ColdDamaged, match="the cold tier is missing") as caught:
            read(tiered, read_only=read_only, span=span)
        assert f"{tiered}-cold" in str(caught.value)
        assert caught.value.missing == (1, BLOCK)
    assert any("the cold tier is missing" in problem for problem in verify(str(tiered)).problems)
    assert verify(str(tiered), cold=f"{tiered}-elsewhere").problems == []


def test_a_log_continues_without_its_tier_if_that_loss_is_accepted(tiered: Path) -> None:
    shutil.rmtree(f"{tiered}-cold")
    open_log(BusConfig(log=str(tiered), accept_loss=True)).close(5.0)

    assert len(read(tiered)) == SIZE - BLOCK
    assert verify(str(tiered)).problems == []


# Verification of the other tables.


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE runs SET last_sequence = 3 WHERE block = 0", "table of runs"),
        ("DELETE FROM runs WHERE block = 1", "table of runs"),
        ("DELETE FROM publishers", "1 publishers are missing"),
        ("UPDATE publishers SET last_sequence = 3", "1 publishers are missing"),
        ("UPDATE blocks SET bytes = 3 WHERE block = 0", "table of blocks"),
        ("DELETE FROM blocks WHERE block = 0", "missing from the table of blocks"),
        ("UPDATE by_key SET offsets = '[1]' WHERE block = 0 AND key = 1", "key index"),
        ("DELETE FROM by_key WHERE block = 1 AND key = 1", "key index"),
        ("UPDATE keys SET key = 'k/x' WHERE id = 1", "checksum"),
        ("DELETE FROM keys WHERE id = 1", "its key is unknown"),
        ("UPDATE state SET offloaded_until = 3", "state"),
    ],
)
def test_verify_names_damage_of_every_table(path: Path, statement: str, named: str) -> None:
    assert verify(str(path)).problems == []
    change(path, statement)

    problems = verify(str(path)).problems
    assert any(named in problem for problem in problems), problems
