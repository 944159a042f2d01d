"""Backfill: a range of a log is passed through a function and published under other keys, exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spark_support import spark
from tier_support import SEGMENT_EVENTS, make_log, replayed

import zbus
from zbus.errors import ConfigInvalid, KeyInvalid, LogTrimmed, ZbusError
from zbus_log import Rules, prune
from zbus_spark.cli import app
from zbus_spark.failures import SparkFailed
from zbus_spark.jobs.backfill import backfill
from zbus_spark.jobs.offload import offload
from zbus_spark.jobs.trim import trim

EVENTS = 6000
SHOUT = "backfill_functions:shout"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return make_log(tmp_path / "app.db", EVENTS)


async def test_a_range_is_passed_through_the_function_once_in_order_including_the_tier(log: Path) -> None:
    offload(spark(), log, segment_events=SEGMENT_EVENTS)
    trim(log)
    before = await replayed(log)
    wanted = [each for each in before if each[3].startswith("shop/orders") and 3000 <= each[0] <= 5000]

    done = backfill(spark(), log, SHOUT, key="shop/orders/*", start=3000, end=5000)
    again = backfill(spark(), log, SHOUT, key="shop/orders/*", start=3000, end=5000)

    assert (done.events, done.done_before) == (len(wanted), False)
    assert again == done._replace(done_before=True)
    made = await replayed(log, "loud/**")
    assert [(each[3], each[4], each[5]) for each in made] == [
        (f"loud/{each[3]}", each[4].upper(), each[5]) for each in wanted
    ]
    assert (await replayed(log))[:EVENTS] == before


async def test_without_an_end_it_is_done_once_too(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"

    first = backfill(spark(), log, SHOUT, key="audit/**", to=other)
    make_log(tmp_path / "more.db", 1)
    async with zbus.open(log) as bus:
        await (await bus.publisher("audit/log")).publish(b"late")

    assert backfill(spark(), log, SHOUT, key="audit/**", to=other) == first._replace(done_before=True)
    assert len(await replayed(other)) == first.events == EVENTS // 5


async def test_live_subscribers_of_the_owner_receive_the_result(log: Path) -> None:
    import asyncio

    async with zbus.open(log) as bus, bus.subscribe("loud/**") as subscriber:
        done = await asyncio.to_thread(backfill, spark(), log, SHOUT, key="audit/log", end=50)
        seen = [(await anext(subscriber)).payload for _ in range(done.events)]

    assert seen == [b"PAYLOAD %d" % number for number in range(2, 50, 5)]


async def test_a_function_that_would_read_its_own_output_publishes_nothing(log: Path, tmp_path: Path) -> None:
    before = await replayed(log)

    with pytest.raises(SparkFailed, match="it would read its own output"):
        backfill(spark(), log, "backfill_functions:echo", key="shop/**", end=100)

    assert await replayed(log) == before
    done = backfill(spark(), log, "backfill_functions:echo", key="shop/**", end=100, to=tmp_path / "other.db")
    assert done.events == 60


BAD: dict[str, tuple[type[ZbusError], str, dict[str, Any]]] = {
    "no-colon": (ConfigInvalid, "must be written as module:function", {"function": "backfill_functions"}),
    "no-module": (ConfigInvalid, "there is no module 'nowhere'", {"function": "nowhere:at_all"}),
    "no-function": (ConfigInvalid, "has no function 'nothing'", {"function": "backfill_functions:nothing"}),
    "a-number": (ConfigInvalid, "has no function 'number'", {"function": "backfill_functions:number"}),
    "no-frame": (ConfigInvalid, "returned NoneType", {"function": "backfill_functions:none"}),
    "too-many": (ConfigInvalid, "additional columns: offset, namespace", {"function": "backfill_functions:too_many"}),
    "too-few": (ConfigInvalid, "without key", {"function": "backfill_functions:too_few"}),
    "bad-key": (KeyInvalid, "empty segment", {"key": "a//b"}),
    "gone": (LogTrimmed, "removed by retention", {"start": 50}),
    "no-log": (ConfigInvalid, "there is no log", {"log": "none.db"}),
}


@pytest.mark.parametrize("name", BAD)
async def test_an_invalid_backfill_is_one_clear_error(log: Path, name: str) -> None:
    kind, says, changed = BAD[name]
    prune(log, Rules(until=100))
    before = await replayed(log)
    arguments = {"log": log, "function": SHOUT, "key": "shop/**"} | changed

    with pytest.raises(kind, match=says):
        backfill(spark(), arguments.pop("log"), arguments.pop("function"), **arguments)

    assert await replayed(log) == before


def test_the_command_reports_what_was_published(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["backfill", str(log), SHOUT, "--key", "audit/*", "--end", "100", "--master", "local[2]"]

    app(arguments, standalone_mode=False)
    first = capfd.readouterr().err
    app(arguments, standalone_mode=False)

    assert "published 20 events" in first
    assert "nothing was published: an earlier run published 20 events" in capfd.readouterr().err
