"""`zbus pipeline`: the jobs as commands, with data on stdout, prose on stderr, and errors in one line."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from log_support import raw
from pipeline_support import BEGIN_NS, Stored, frame, pipeline, store
from spark_support import spark
from tier_support import SEGMENT_EVENTS, make_log

from zbus.errors import ConfigInvalid
from zbus_log import Rules, SqliteLog, prune
from zbus_spark import session
from zbus_spark.cli import progress
from zbus_spark.jobs import coverage, gaps, rollup, sessions
from zbus_spark.jobs.offload import offload
from zbus_spark.jobs.trim import trim

ROOT = Path(__file__).parents[2]
SECOND = 1_000_000_000
WAIT_S = 100.0


def shop(minutes: int, begin: int = 0) -> list[Stored]:
    """Return ten events per minute for each of two keys, some with a latency."""
    return [
        Stored(
            publisher_id,
            number,
            f"shop/{'orders' if publisher_id == 1 else 'carts'}/changed",
            time_ns := BEGIN_NS + (number * 6 + publisher_id) * SECOND,
            b'{"user": "u%d"}' % (number % 3),
            {"sent-at-ns": str(time_ns - number * 1000), "session-id": f"s{number % 4}"} if number % 2 else {},
        )
        for number in range(begin * 10, (begin + minutes) * 10)
        for publisher_id in (1, 2)
    ]


def as_printed(rows: Any) -> list[dict[str, Any]]:
    """Return rows as the command prints them."""
    return [
        {
            name: f"{value.isoformat()}+00:00" if isinstance(value, datetime) else value
            for name, value in row.asDict().items()
        }
        for row in rows
    ]


def test_rollup_prints_windows_and_leaves_parquet_and_a_report(log_path: Path, tmp_path: Path) -> None:
    events = shop(minutes=3)
    store(log_path, events)
    html, parquet = tmp_path / "report.html", tmp_path / "windows"

    done = pipeline("rollup", log_path, "--json", "--html", html, "--parquet", parquet)

    expected = as_printed(rollup(frame(events)).orderBy("start", "key").collect())
    assert (done.code, done.lines) == (0, expected)
    assert done.err.splitlines() == [f"written: {parquet}", f"written: {html}"]
    assert as_printed(spark().read.parquet(str(parquet)).orderBy("start", "key").collect()) == expected
    assert "shop/orders/changed" in html.read_text()


@pytest.mark.parametrize(
    "stream",
    [pytest.param((), id="rollup"), pytest.param(("--follow", "--once"), id="stream", marks=pytest.mark.nightly)],
)
def test_a_rollup_that_fails_in_mid_read_leaves_nothing_and_may_be_run_again(
    log_path: Path, tmp_path: Path, stream: tuple[str, ...]
) -> None:
    store(log_path, shop(minutes=300))
    whole = log_path.read_bytes()
    half = len(whole) // 2
    log_path.write_bytes(whole[:half] + bytes(40_000) + whole[half + 40_000 :])
    html, parquet = tmp_path / "report.html", tmp_path / "windows"
    arguments = ["rollup", log_path, "--parquet", parquet, *(stream or ("--html", html))]

    failed = pipeline(*arguments)
    left = [each for each in tmp_path.rglob("*") if not each.name.startswith("app.db")]
    log_path.write_bytes(whole)
    again = pipeline(*arguments)

    assert (failed.code, failed.out) == (1, "")
    assert "malformed" in failed.err
    assert left == ([parquet] if stream else [])
    assert again.code == 0, again.err
    kept = spark().read.parquet(str(parquet))
    assert kept.count() == (600 if not stream else 596)
    assert not [each for each in parquet.rglob(".*") if not each.name.endswith(".crc")]


def test_windows_are_not_left_behind_if_the_report_fails(log_path: Path, tmp_path: Path) -> None:
    store(log_path, shop(minutes=1))
    (tmp_path / "report.html").mkdir()  # no file can take its place

    done = pipeline("rollup", log_path, "--parquet", tmp_path / "windows", "--html", tmp_path / "report.html")

    assert (done.code, done.out) == (1, "")
    assert [each.name for each in tmp_path.iterdir() if not each.name.startswith("app.db")] == ["report.html"]


def test_rollup_prints_a_table_of_the_busiest_keys_of_a_part(log_path: Path) -> None:
    store(log_path, shop(minutes=3))

    done = pipeline("rollup", log_path, "--key", "*/carts/*", "--after", 20, "--until", 40, "--rows", 5)

    assert (done.code, done.err) == (0, "")
    (row,) = [line for line in done.out.splitlines() if "shop/" in line]
    assert "shop/carts/changed" in row
    assert " 10 " in row


@pytest.mark.nightly  # the function itself is tested with the others
def test_a_stream_prints_each_window_once_when_it_has_ended(log_path: Path, tmp_path: Path) -> None:
    checkpoint, parquet = tmp_path / "checkpoint", tmp_path / "windows"
    follow = ["rollup", log_path, "--follow", "--once", "--checkpoint", checkpoint, "--watermark", "1 minute"]
    events = shop(minutes=4)
    store(log_path, events)
    first = pipeline(*follow, "--json", "--parquet", parquet)
    store(log_path, shop(minutes=4, begin=4))
    second = pipeline(*follow, "--json", "--parquet", parquet)
    third = pipeline(*follow)

    whole = as_printed(rollup(frame(shop(minutes=8))).orderBy("start", "key").collect())
    # The last event is 1 s before the end of the eighth minute, and one minute may be late: two minutes are not over.
    assert [done.code for done in (first, second, third)] == [0, 0, 0]
    assert [done.err for done in (first, second, third)] == ["", "", ""]
    assert first.lines == whole[:4]
    assert first.lines + second.lines == whole[:12]
    assert third.out == ""
    kept = spark().read.parquet(str(parquet)).drop("batch").orderBy("start", "key")
    assert as_printed(kept.collect()) == whole[:12]


@pytest.mark.nightly  # a query more
def test_a_stream_reports_events_later_than_its_watermark_and_counts_all_others(log_path: Path, tmp_path: Path) -> None:
    follow = ["rollup", log_path, "--follow", "--once", "--json", "--checkpoint", tmp_path / "checkpoint"]
    follow += ["--parquet", tmp_path / "windows"]
    store(log_path, shop(minutes=4))
    first = pipeline(*follow)
    late = [
        Stored(3, number, f"late/{number}", BEGIN_NS + minute * 60 * SECOND, b"")
        for number, minute in enumerate((0, 1, 3))
    ]
    store(log_path, late)  # up to the third minute they are too late, and the fourth is open
    second = pipeline(*follow)
    store(log_path, shop(minutes=4, begin=4))
    third = pipeline(*follow)

    assert [done.code for done in (first, second, third)] == [0, 0, 0]
    assert (first.err, third.err) == ("", "")
    batch, total = second.err.splitlines()
    assert batch.startswith("dropped: late events of 2 windows that ended before 2026-")
    assert total == "dropped events of 2 windows in total: they were later than the watermark (1 minute)"
    assert [line["key"] for line in first.lines + second.lines + third.lines if "late" in line["key"]] == ["late/2"]


@pytest.mark.timeout(4 * WAIT_S)
@pytest.mark.nightly  # a Spark of its own
def test_following_shows_its_progress_on_a_terminal_and_ends_with_ctrl_c(log_path: Path) -> None:
    store(log_path, shop(minutes=4))
    command = [sys.executable, "-m", "zbus", "pipeline", "rollup", str(log_path), "--follow", "--json"]
    command += ["--master", "local[1]"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZBUS_")} | {
        "COLUMNS": "100"
    }
    terminal, end = pty.openpty()
    shown: list[bytes] = []
    reading = threading.Thread(target=_read_all, args=(terminal, shown))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, env=environment) as following:
        os.close(end)
        reading.start()
        assert following.stdout is not None
        too_long = threading.Timer(WAIT_S, following.kill)  # a command that has printed nothing by then hangs
        too_long.start()
        windows = [json.loads(following.stdout.readline() or "null") for _ in range(4)]
        too_long.cancel()
        deadline = time.monotonic() + WAIT_S
        while b"rolling up" not in b"".join(shown):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        following.send_signal(signal.SIGINT)
        assert following.wait(WAIT_S) == 0
    reading.join(WAIT_S)
    os.close(terminal)

    assert windows == as_printed(rollup(frame(shop(minutes=4))).orderBy("start", "key").collect())[:4]
    assert b"tasks" in b"".join(shown)
    assert b"Traceback" not in b"".join(shown)


def test_a_job_shows_its_tasks_on_a_terminal_and_nothing_elsewhere(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(log_path, shop(minutes=4))
    terminal, end = pty.openpty()
    shown: list[bytes] = []
    reading = threading.Thread(target=_read_all, args=(terminal, shown))
    reading.start()
    with monkeypatch.context() as patched, os.fdopen(end, "w") as screen:
        patched.setenv("TERM", "xterm")
        patched.setenv("COLUMNS", "100")
        patched.setattr(progress, "LOOK_S", 0.01)  # a job of few events is over soon
        patched.setattr(sys, "stderr", screen)
        done = pipeline("gaps", log_path, "--json")
    reading.join(WAIT_S)
    os.close(terminal)

    assert (done.code, done.out) == (0, "")
    assert b"starting Spark" in b"".join(shown)
    assert b"finding gaps" in b"".join(shown)
    plain = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", b"".join(shown))
    assert re.search(rb"finding gaps [^\r\n]* [1-9]\d*/\d+ tasks", plain)


def _read_all(descriptor: int, shown: list[bytes]) -> None:
    try:
        while data := os.read(descriptor, 1 << 16):
            shown.append(data)
    except OSError:  # the other end is closed
        pass


def test_gaps_lists_missing_events_including_those_known_from_beacons(log_path: Path) -> None:
    events = [event for event in shop(minutes=3) if event[:2] not in ((1, 4), (1, 5), (2, 29))]
    store(log_path, events)
    log = SqliteLog(str(log_path))
    log.positions.load()
    log.positions.store({"heard/2": 30, "heard/ff": 2, "other": 7})
    log.close(5.0)

    done = pipeline("gaps", log_path, "--json", "--check")

    assert done.lines == as_printed(gaps(frame(events), {2: 29, 255: 1}).collect())
    assert [(line["publisher_id"], line["finding"], line["events"]) for line in done.lines] == [
        (1, "between", 2),
        (2, "after_last", 1),
        (255, "after_last", 2),
    ]
    assert (done.code, done.err) == (1, "missing: 5, late: 0, duplicate: 0\n")


def test_gaps_does_not_count_removed_events_as_missing(log_path: Path) -> None:
    store(log_path, shop(minutes=3))
    prune(log_path, Rules(until=20))

    done = pipeline("gaps", log_path, "--check")

    assert done.code == 0
    assert done.out.count("trimmed") == 2
    assert done.err.splitlines() == [
        "missing: 0, late: 0, duplicate: 0",
        "events up to offset 20 were removed from this log and do not count as missing",
    ]


@pytest.mark.nightly  # the function itself is tested with the others
def test_gaps_reads_the_cold_tier_and_names_it_if_it_is_missing(tmp_path: Path) -> None:
    log = make_log(tmp_path / "app.db", 9000)
    prune(log, Rules(until=1000))
    offload(spark(), log, segment_events=SEGMENT_EVENTS)
    trim(log)
    moved = shutil.copytree(f"{log}-cold", tmp_path / "moved")

    for options in ((), ("--cold", moved)):
        done = pipeline("gaps", log, "--check", "--json", *options)
        assert done.code == 0
        assert [(line["finding"], line["events"]) for line in done.lines] == [("trimmed", 1000)]
        assert "events up to offset 1,000 were removed" in done.err
    shutil.rmtree(f"{log}-cold")
    done = pipeline("gaps", log, "--check", "--json")
    assert (done.code, done.lines) == (1, [])
    assert f"{log}-cold" in done.err
    assert "the cold tier is missing" in done.err


@pytest.mark.nightly  # the function itself is tested with the others
def test_coverage_compares_two_logs(tmp_path: Path) -> None:
    events = shop(minutes=3)
    other = [event._replace(payload=b"?") if event[:2] == (2, 3) else event for event in events if event[:2] != (1, 9)]
    left, right = store(tmp_path / "left.db", events), store(tmp_path / "right.db", other)

    done = pipeline("coverage", left, right, "--json", "--check")
    same = pipeline("coverage", left, right, "--check", "--key", "shop/orders/*", "--until", "2026-09-21T14:14:40Z")

    assert done.lines == as_printed(coverage(frame(events), frame(other)).collect())
    assert (done.code, done.err) == (1, "only in the first: 1, only in the second: 0, different: 1\n")
    assert (same.code, same.err) == (0, "only in the first: 0, only in the second: 0, different: 0\n")


def test_sessions_are_listed_and_events_without_one_are_counted(log_path: Path) -> None:
    events = shop(minutes=3)
    store(log_path, events)

    done = pipeline("sessions", log_path, "--by", "header:session-id", "--gap", "20s", "--json")
    table = pipeline("sessions", log_path, "--by", "payload:user", "--rows", 2)

    assert (done.code, done.err) == (0, "30 events have no header:session-id and belong to no session\n")
    assert done.lines == as_printed(sessions(frame(events), "header:session-id", "20s").collect())
    assert (table.code, table.err) == (0, "only the first 2 rows are shown; use --rows for more, or --json for all\n")
    assert table.out.count("│ u") == 2


WRONG = {
    "no log": (["rollup", "NOWHERE"], 2, "there is no log"),
    "no log to follow": (["rollup", "NOWHERE", "--follow", "--once"], 2, "there is no log"),
    "no log to compare with": (["coverage", "LOG", "NOWHERE"], 2, "there is no log"),
    "a bad key expression": (["rollup", "LOG", "--key", "a//b"], 2, "a//b"),
    "a bad window": (["rollup", "LOG", "--window", "soon"], 2, "'soon' is not a duration"),
    "a bad watermark": (["rollup", "LOG", "--follow", "--watermark", "1 month"], 2, "is not a duration"),
    "a report of a stream": (["rollup", "LOG", "--follow", "--html", "x.html"], 2, "--html"),
    "once of no stream": (["rollup", "LOG", "--once"], 2, "--follow"),
    "a report nowhere": (["rollup", "LOG", "--html", "NOWHERE/x.html"], 2, "there is no folder"),
    "files over others": (["rollup", "LOG", "--parquet", "FOLDER"], 2, "already exists"),
    "an unwritable checkpoint": (["rollup", "LOG", "--follow", "--once", "--checkpoint", "/proc/x/y"], 1, "/proc/x"),
    "an invalid field": (["sessions", "LOG", "--by", "user"], 2, "header:NAME"),
    "no log at all": (["gaps", "NOTALOG"], 1, "NOTALOG"),
    "a log of a newer version": (["rollup", "NEWER", "--parquet", "OUT"], 1, "upgrade zbus"),
    "a newer log to offload": (["offload", "NEWER"], 1, "upgrade zbus"),
    "a trimmed range": (["rollup", "TRIMMED", "--after", "5", "--parquet", "OUT"], 1, "5 up to 10 were removed"),
    "a trimmed end": (["sessions", "TRIMMED", "--by", "header:x", "--until", "10"], 1, "to 10 were removed"),
    "a folder that is not empty": (["demo", "FOLDER"], 2, "not an empty folder"),
}


def there(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder and their content, without the files that a log has while it is read."""
    found = {each.relative_to(folder).as_posix(): each for each in folder.rglob("*")}
    return {
        name: each.read_bytes() if each.is_file() else b""
        for name, each in found.items()
        if not name.endswith(("-wal", "-shm", "-head"))
    }


@pytest.mark.parametrize("case", WRONG)
def test_every_error_is_one_line(tmp_path: Path, case: str) -> None:
    arguments, code, message = WRONG[case]
    (tmp_path / "NOTALOG").write_text("something else entirely, and long enough to be looked at" * 100)
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FOLDER" / "file").touch()
    for name in ("LOG", "NEWER", "TRIMMED"):
        store(tmp_path / name, shop(minutes=1))
    prune(tmp_path / "TRIMMED", Rules(until=10))
    connection = raw(tmp_path / "NEWER")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    named = ("NOWHERE", "LOG", "NEWER", "TRIMMED", "NOTALOG", "FOLDER", "OUT", "NOWHERE/x.html")
    names = {name: str(tmp_path / name) for name in named}
    before = there(tmp_path)

    done = pipeline(*(names.get(each, each) for each in arguments))

    assert there(tmp_path) == before  # nothing was written
    assert (done.code, done.out) == (code, "")
    (line,) = done.err.splitlines()
    assert line.startswith("zbus: ")
    assert message in line
    assert len(line) < 600
    assert "Exception" not in line


@pytest.mark.nightly  # half a minute of Spark
def test_the_demo_leaves_a_log_a_tier_and_a_report(tmp_path: Path) -> None:
    done = pipeline("demo", tmp_path / "demo", "--events", 40_000)

    assert done.code == 0, done.err
    assert f"report: {tmp_path / 'demo' / 'rollup.html'}" in done.out
    assert "offloaded 36,863 events" in done.out
    (gap,) = [line for line in done.out.splitlines() if "between" in line]
    assert "4,000" in gap
    assert "4,119" in gap
    assert "warehouse/stock/changed" in (tmp_path / "demo" / "rollup.html").read_text()
    assert (tmp_path / "demo" / "shop.db-cold" / "manifest.json").is_file()


def test_a_missing_java_is_reported_with_its_install_command_after_errors_of_the_call(
    log_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark()  # the shared session, which must be started while Java is available
    store(log_path, shop(minutes=1))
    file = tmp_path / "pipeline.toml"
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "empty"))
    message = "Spark needs Java 17 or later, but it was not found: sudo apt-get install -y openjdk-17-jre-headless"

    with pytest.raises(ConfigInvalid, match=message) as caught:
        session()
    assert caught.value.field == "java"
    file.write_text('[source]\nlog = "app.db"\nkye = "a"\n[sink]\ntable = true\n')
    bad = pipeline("run", file)
    file.write_text('[source]\nlog = "app.db"\n[sink]\ntable = true\n')
    good = pipeline("run", file)

    assert (bad.code, good.code) == (2, 2)
    assert "source.kye" in bad.err
    assert "Java" not in bad.err
    assert good.err == f"zbus: java: {message}\n"


@pytest.mark.timeout(300)
@pytest.mark.nightly  # it is what the command takes on a machine with nothing else to do
def test_make_demo_pipeline_takes_less_than_90_s() -> None:
    folder = ROOT / "zbus-pipeline-demo"
    there = folder.exists()
    began = time.monotonic()
    command = ["make", "--old-file=.venv/.ready", "demo-pipeline", f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    took_s = time.monotonic() - began
    report = folder / "rollup.html"
    left = report.is_file() and report.stat().st_size
    if not there:
        shutil.rmtree(folder, ignore_errors=True)

    assert done.returncode == 0, done.stderr
    assert "200,000 events published" in done.stderr
    assert left
    assert took_s < 90
