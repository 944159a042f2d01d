"""`zbus pipeline run`: a pipeline in a file, checked as a whole before Spark starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from spark_support import spark
from tier_support import make_log, replayed

from zbus.errors import ConfigInvalid
from zbus.ports.log import Row
from zbus_log import put
from zbus_spark.cli import app
from zbus_spark.failures import SparkFailed
from zbus_spark.jobs.pipeline_file import load, run

EVENTS = 1000
GOOD = """
[source]
log = "app.db"
key = "shop/**"
start = 101

[[steps]]
name = "orders"
sql = "SELECT key, payload, offset FROM events WHERE topic = 'paid'"

[[steps]]
sql = "SELECT concat('copy/', o.key) AS key, o.payload FROM orders o JOIN events e ON o.offset = e.offset"

[sink]
log = "copies.db"
"""
SOURCE = '[source]\nlog = "app.db"\n'
TABLE = "[sink]\ntable = true\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    make_log(tmp_path / "app.db", EVENTS)
    return tmp_path / "pipeline.toml"


async def test_events_are_published_to_a_log_once(file: Path) -> None:
    file.write_text(GOOD)

    first = run(spark(), load(file))
    again = run(spark(), load(file))

    assert (first.events, first.done_before) == (180, False)
    assert (again.events, again.done_before) == (180, True)
    made = await replayed(file.parent / "copies.db")
    assert len(made) == 180
    assert {each[3] for each in made} == {"copy/shop/orders/paid"}
    assert sorted(each[4] for each in made) == sorted(b"payload %d" % number for number in range(101, EVENTS, 5))


def test_a_table_goes_to_stdout_and_a_folder_of_parquet_is_written_once(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    count = '[[steps]]\nsql = "SELECT namespace, count(*) AS n FROM events GROUP BY namespace ORDER BY n DESC"\n'
    file.write_text(SOURCE + count + TABLE)
    app(["run", str(file), "--master", "local[2]", "--json"], standalone_mode=False)
    assert capfd.readouterr().out.splitlines()[0] == '{"namespace":"shop","n":600}'

    file.write_text(SOURCE + count + '[sink]\nparquet = "out"\n')
    app(["run", str(file), "--master", "local[2]"], standalone_mode=False)
    assert spark().read.parquet(str(file.parent / "out")).count() == 3
    with pytest.raises(ConfigInvalid, match="already exists"):
        load(file)


@pytest.mark.parametrize("replace", [False, True], ids=["a-new-folder", "over-an-old-one"])
def test_a_run_that_fails_leaves_the_folder_as_it_was_and_may_be_run_again(file: Path, replace: bool) -> None:
    out = file.parent / "out"
    if replace:
        spark().range(7).write.parquet(str(out))
    sql = "SELECT IF(offset < {}, offset, raise_error('that is enough')) AS offset FROM events"
    sink = '[sink]\nparquet = "out"\n' + ("replace = true\n" if replace else "")

    file.write_text(f'{SOURCE}[[steps]]\nsql = "{sql.format(900)}"\n{sink}')
    with pytest.raises(SparkFailed, match="that is enough"):
        run(spark(), load(file))
    assert out.exists() == replace
    if replace:
        assert spark().read.parquet(str(out)).count() == 7
    file.write_text(f'{SOURCE}[[steps]]\nsql = "{sql.format(2000)}"\n{sink}')
    run(spark(), load(file))

    assert spark().read.parquet(str(out)).count() == EVENTS
    assert {each.name for each in file.parent.iterdir() if not each.name.startswith("app.db")} == {"out", file.name}


async def test_a_stream_resumes_at_its_position(file: Path) -> None:
    file.write_text(
        SOURCE
        + 'key = "audit/*"\nstream = true\nuntil = "read"\ncheckpoint = "checkpoint"\n'
        + "[[steps]]\nsql = \"SELECT 'seen/audit' AS key, payload FROM events\"\n"
        + '[sink]\nlog = "copies.db"\n'
    )

    run(spark(), load(file))
    run(spark(), load(file))
    assert len(await replayed(file.parent / "copies.db")) == 200

    put(file.parent / "app.db", [[Row(9, number, 1, "audit/new", b"new", None) for number in range(5)]])
    run(spark(), load(file))
    assert len(await replayed(file.parent / "copies.db")) == 205


def test_sql_that_spark_does_not_understand_is_one_line(file: Path) -> None:
    file.write_text(SOURCE + '[[steps]]\nsql = "SELEC nothing"\n' + TABLE)

    with pytest.raises(SparkFailed) as caught:
        run(spark(), load(file))

    assert "SELEC" in str(caught.value)
    assert "\n" not in str(caught.value)


BAD = {
    "not-toml": ("source = [", "", "not valid TOML"),
    "no-source": (TABLE, "source", "Field required"),
    "no-sink": (SOURCE, "sink", "Field required"),
    "unknown-field": (SOURCE + 'kye = "a"\n' + TABLE, "source.kye", "there is no such field"),
    "unknown-table": (SOURCE + TABLE + "[sorce]\n", "sorce", "there is no such field"),
    "start-and-from": (SOURCE + "start = 1\nfrom = 2026-01-01T00:00:00Z\n" + TABLE, "source", "not both"),
    "end-and-to": (SOURCE + "end = 1\nto = 2026-01-01T00:00:00Z\n" + TABLE, "source", "not both"),
    "bad-key": (SOURCE + 'key = "a//b"\n' + TABLE, "source.key", "empty segment"),
    "bad-offset": (SOURCE + "start = -1\n" + TABLE, "source.start", "greater than or equal to 0"),
    "missing-log": ('[source]\nlog = "none.db"\n' + TABLE, "source.log", "there is no log"),
    "empty-sql": (SOURCE + '[[steps]]\nsql = " "\n' + TABLE, "steps.1.sql", "should match"),
    "bad-name": (SOURCE + '[[steps]]\nname = "a b"\nsql = "SELECT 1"\n' + TABLE, "steps.1.name", "should match"),
    "same-name": (
        SOURCE + '[[steps]]\nname = "Events"\nsql = "SELECT 1"\n' + TABLE,
        "",
        "two views are named 'Events'",
    ),
    "two-sinks": (SOURCE + TABLE + 'parquet = "out"\n', "sink", "one of: log, parquet, table"),
    "no-such-folder": (SOURCE + '[sink]\nparquet = "none/out"\n', "sink.parquet", "there is no folder"),
    "sink-key": (SOURCE + '[sink]\nlog = "out.db"\nkey = "a/*"\n', "sink", "without wildcards"),
    "remote-sink": (SOURCE + '[sink]\nlog = "zenoh://127.0.0.1:1"\n', "sink.log", "on the driver's host"),
    "no-checkpoint": (SOURCE + "stream = true\n" + TABLE, "source", "needs a checkpoint"),
    "streamed-table": (SOURCE + 'stream = true\ncheckpoint = "c"\n' + TABLE, "", "a stream needs a log"),
    "checkpoint-alone": (SOURCE + 'checkpoint = "c"\n' + TABLE, "source", "stream = true"),
    "stream-with-end": (SOURCE + 'stream = true\ncheckpoint = "c"\nend = 5\n' + TABLE, "source", "has no end"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_error_in_a_file_names_the_field(file: Path, name: str) -> None:
    text, place, says = BAD[name]
    file.write_text(text)

    with pytest.raises(ConfigInvalid) as caught:
        load(file)

    assert caught.value.field == (f"{file}: {place}" if place else str(file))
    assert says in caught.value.reason


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="No such file"):
        load(tmp_path / "none.toml")
