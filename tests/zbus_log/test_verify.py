"""Verifying: a healthy log has no problems, and every damage is named."""

from __future__ import annotations

import shutil
import threading
from itertools import count
from pathlib import Path

import pytest
from log_support import append, ask, wait_until

from zbus import BusConfig
from zbus.errors import LogDamaged
from zbus.ports.log import Row
from zbus_log import Rules, open_log, verify
from zbus_log.file import sqlite_driver
from zbus_log.file.tables import BLOCK

SIZE = 2 * BLOCK + 300  # two sealed blocks, and an end that is not sealed


def row(sequence: int) -> Row:
    return Row(1, sequence, sequence, f"k/{sequence % 10}", b"payload-%06d" % sequence, None)


def damage(path: Path, statement: str) -> None:
    """Change a log behind its back, as a bad disk would."""
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
    log.close(5.0)
    return path


@pytest.fixture
def path(healthy: Path, tmp_path: Path) -> Path:
    for suffix in ("", "-head"):
        shutil.copyfile(f"{healthy}{suffix}", f"{tmp_path / 'app.db'}{suffix}")
    return tmp_path / "app.db"


def test_a_healthy_log_has_no_problems(path: Path) -> None:
    report = verify(str(path))

    assert report == (SIZE, 1, SIZE, [], [], (), 0)


@pytest.mark.parametrize("older", ["SELECT 1", "DROP TABLE cursor_uses", "ALTER TABLE cursors DROP COLUMN checksum"])
def test_verification_does_not_write_to_the_file_of_the_cursors(path: Path, older: str) -> None:
    log = open_log(BusConfig(log=str(path)))
    log.cursors.release("billing", log.cursors.claim("billing", ["k/**"], 5).token)
    log.close(5.0)
    connection = sqlite_driver.connect(f"{path}-cursors")
    connection.execute(older).fetchall()
    connection.execute("PRAGMA journal_mode=DELETE").fetchall()
    connection.close()
    before = Path(f"{path}-cursors").read_bytes()

    report = verify(str(path))

    assert report.problems == []
    assert Path(f"{path}-cursors").read_bytes() == before


def test_a_malformed_incarnation_is_damage(path: Path) -> None:
    log = open_log(BusConfig(log=str(path), read_only=True))
    connection = sqlite_driver.connect(str(path))
    malformed = "SELECT ordinal, 'x' AS id, first, started_at, host FROM incarnations"
    connection.execute(f"CREATE TABLE other AS {malformed}").fetchall()
    connection.execute("DROP TABLE incarnations").fetchall()
    connection.execute("ALTER TABLE other RENAME TO incarnations").fetchall()
    connection.close()

    with pytest.raises(LogDamaged, match="malformed value"):
        assert log.lineage
    log.close(5.0)


def test_a_new_log_has_no_problems(tmp_path: Path) -> None:
    open_log(BusConfig(log=str(tmp_path / "new.db"))).close(5.0)

    assert verify(str(tmp_path / "new.db")) == (0, 0, 0, [], [], (), 0)


def test_a_trimmed_log_has_no_problems(path: Path) -> None:
    log = open_log(BusConfig(log=str(path)))
    log.prune(Rules(max_events=BLOCK + 5))
    log.close(5.0)

    assert verify(str(path)) == (BLOCK + 5, SIZE - BLOCK - 4, SIZE, [], [], (), 0)


def test_verify_changes_nothing_and_tells_how_far_it_is(path: Path) -> None:
    before = {each.name: each.read_bytes() for each in path.parent.iterdir() if each.name in ("app.db", "app.db-head")}
    steps: list[tuple[int, int]] = []

    verify(str(path), lambda done, total: steps.append((done, total)))

    assert steps == sorted(steps)
    assert steps[-1] == (SIZE, SIZE)
    assert {name: (path.parent / name).read_bytes() for name in before} == before


def test_a_log_that_is_being_written_has_no_problems(path: Path) -> None:
    log, stop, sequences = open_log(BusConfig(log=str(path))), threading.Event(), count(SIZE)

    def write() -> None:
        while not stop.is_set():
            append(log, [row(next(sequences)) for _ in range(5)])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        reports = [verify(str(path)) for _ in range(3)]
    finally:
        stop.set()
        writer.join(20)
        log.close(5.0)

    assert [report.problems for report in reports] == [[], [], []]
    assert all(report.events >= SIZE for report in reports)


@pytest.mark.parametrize("offset", [1, BLOCK, SIZE])
def test_a_flipped_bit_in_a_payload_is_named(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b"payload-%06d" % (offset - 1))
    data[at + 3] ^= 4
    path.write_bytes(data)

    report = verify(str(path))

    assert len(report.problems) == 1
    assert f"offset {offset} " in report.problems[0]
    assert "checksum" in report.problems[0]
    assert report.events == SIZE


def test_every_bad_event_is_named(path: Path) -> None:
    damage(path, "UPDATE events SET payload = X'00' WHERE offset IN (3, 4, 5000)")

    report = verify(str(path))

    assert [problem.split(" is corrupt")[0] for problem in report.problems] == [
        "event at offset 3",
        "event at offset 4",
        "event at offset 5000",
    ]


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("offset = 1", "1 to 1"),
        ("offset BETWEEN 100 AND 120", "100 to 120"),
        (f"offset BETWEEN {BLOCK - 2} AND {BLOCK + 2}", f"{BLOCK - 2} to {BLOCK + 2}"),
        (f"offset = {SIZE - 5}", f"{SIZE - 5} to {SIZE - 5}"),
    ],
)
def test_missing_events_are_named(path: Path, where: str, named: str) -> None:
    damage(path, f"DELETE FROM events WHERE {where}")

    report = verify(str(path))

    assert [problem for problem in report.problems if "missing" in problem] == [f"offsets {named} are missing"]


def test_events_that_their_key_does_not_lead_to_are_counted(path: Path) -> None:
    damage(
        path,
        "UPDATE by_key SET offsets = (SELECT json_group_array(value) FROM json_each(offsets)"
        " WHERE value NOT IN (7, 8, 5000))",
    )

    (problem,) = verify(str(path)).problems

    assert "3 sealed events" in problem
    assert "key" in problem


def test_a_lost_end_is_named(path: Path) -> None:
    damage(path, f"DELETE FROM events WHERE offset > {SIZE - 10}")

    report = verify(str(path))

    assert [problem for problem in report.problems if "acknowledged" in problem] == [
        f"offsets {SIZE - 9} to {SIZE} were acknowledged and are missing"
    ]
    assert report.head == SIZE - 10


def test_a_loss_that_was_accepted_is_listed_and_is_no_problem(path: Path) -> None:
    damage(path, f"DELETE FROM events WHERE offset > {SIZE - 10}")
    log = open_log(BusConfig(log=str(path), accept_loss=True))
    (offset,) = append(log, [row(SIZE)])
    log.close(5.0)

    report = verify(str(path))

    assert report.problems == []
    assert report.losses == [(SIZE - 9, offset - 1)]
    assert report.events == SIZE - 9


def test_a_missing_head_record_is_named(path: Path) -> None:
    Path(f"{path}-head").unlink()

    (problem,) = verify(str(path)).problems

    assert "no head record" in problem


@pytest.mark.parametrize("garbage", [b"garbage", bytes(range(256)) * 16])
def test_a_damaged_head_record_is_named(path: Path, garbage: bytes) -> None:
    Path(f"{path}-head").write_bytes(garbage)

    (problem,) = verify(str(path)).problems

    assert "head record" in problem


def test_another_log_in_its_place_is_named(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    log = open_log(BusConfig(log=str(tmp_path / "other" / "app.db")))
    append(log, [row(n) for n in range(SIZE + 1)])
    log.close(5.0)
    shutil.copyfile(tmp_path / "other" / "app.db", path)

    (problem,) = verify(str(path)).problems

    assert "a different log" in problem


def test_a_file_that_sqlite_cannot_read_is_a_problem_and_no_crash(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8192 * 3 : 8192 * 40] = bytes(8192 * 37)
    path.write_bytes(data)

    assert verify(str(path)).problems


def test_a_file_that_is_no_log_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("these are my notes" * 1000)
    connection = sqlite_driver.connect(str(tmp_path / "mine.db"))
    connection.execute("CREATE TABLE mine (x)")
    connection.close()

    assert verify(str(tmp_path / "notes.db")).problems
    assert verify(str(tmp_path / "mine.db")).problems
    assert verify(str(tmp_path / "missing.db")).problems


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE events SET checksum = checksum + 1 WHERE offset = 5000", "offsets 4096 to 8191 does not match"),
        ("DELETE FROM events WHERE offset = 4096", "offsets 4096 to 8191 does not match"),
        ("UPDATE blocks SET digest = zeroblob(16) WHERE block = 0", "offsets 0 to 4095 does not match"),
        ("UPDATE blocks SET digest = NULL WHERE block = 1", "offsets 4096 to 8191 is missing"),
    ],
)
def test_a_digest_that_does_not_match_its_events_is_named(path: Path, statement: str, named: str) -> None:
    damage(path, statement)

    assert any(named in problem for problem in verify(str(path)).problems)


def test_events_that_were_replaced_with_valid_ones_are_named_by_their_digest(path: Path) -> None:
    """Each event has the right checksum, at the right offset; only the chain knows that it is another one."""
    other = path.with_name("other.db")
    log = open_log(BusConfig(log=str(other)))
    append(log, [row(n + 100) for n in range(SIZE)])
    log.close(5.0)
    connection = sqlite_driver.connect(str(path))
    for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute("ATTACH ? AS other", (str(other),))
    connection.execute("DELETE FROM events WHERE offset = 4100")
    connection.execute("INSERT INTO events SELECT * FROM other.events WHERE offset = 4100")
    connection.execute(
        "UPDATE by_key SET offsets = (SELECT json_group_array(offset) FROM events"
        " WHERE events.key = by_key.key AND offset / 4096 = block) WHERE block = 1"
    )
    connection.close()

    assert "the digest of offsets 4096 to 8191 does not match their events" in verify(str(path)).problems


def test_incarnations_that_do_not_ascend_are_named(path: Path) -> None:
    open_log(BusConfig(log=str(path))).close(5.0)
    assert verify(str(path)).problems == []
    damage(path, "UPDATE incarnations SET first = 7 WHERE ordinal = 1")
    damage(path, "UPDATE incarnations SET first = 6 WHERE ordinal = 2")

    assert any("begins at offset 6, before its predecessor, at 7" in each for each in verify(str(path)).problems)


def test_checksums_of_removed_events_that_are_malformed_are_named(path: Path) -> None:
    log = open_log(BusConfig(log=str(path)))
    log.prune(Rules(until=SIZE - 3))
    log.close(5.0)
    assert verify(str(path)).problems == []
    damage(path, "UPDATE removed SET leaves = substr(leaves, 2)")

    assert f"to {SIZE - 3} are malformed" in verify(str(path)).problems[-1]


def test_a_file_of_version_0_1_has_no_problems_before_and_after_its_migration(tmp_path: Path) -> None:
    data = Path(__file__).parents[1] / "data" / "v1" / "log.db"
    path = tmp_path / "app.db"
    for suffix in ("", "-head"):
        shutil.copyfile(f"{data}{suffix}", f"{path}{suffix}")
    assert verify(str(path)).problems == []
    log = open_log(BusConfig(log=str(path)))
    append(log, [row((1 << 40) + n) for n in range(2 * BLOCK)])
    wait_until(lambda: ask(path, "SELECT count(*) FROM blocks WHERE digest IS NOT NULL") >= 2)
    log.close(5.0)

    assert verify(str(path)).problems == []
