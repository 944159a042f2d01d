"""kill -9 of an offload at every stage, and at random moments while Spark works: done again, all is there once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from spark_support import spark
from tier_support import SEGMENT_EVENTS, in_tier, make_log, replayed

from zbus_log.cold.tier import Cold
from zbus_spark.jobs.offload import offload
from zbus_spark.jobs.trim import trim

CHILD = Path(__file__).parent.parent / "support" / "offload_child.py"
EVENTS = 18_000
WHOLE = {f"seg={1:020}-{8191:020}", f"seg={8192:020}-{16_383:020}"}
STAGES = [("writing", 1), ("verifying", 1), ("moving", 1), ("moving", 2), ("listing", 1), ("done", 1)]


def start(log: Path, stage: str, times: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, CHILD, log, stage, str(times)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


async def check(log: Path, before: list[object]) -> None:
    """The remains of a killed offload change nothing for readers, and the next offload completes it."""
    cold = Path(f"{log}-cold")
    assert await replayed(log) == before
    offload(spark(), log, segment_events=SEGMENT_EVENTS)
    assert in_tier(cold) == WHOLE
    assert (Cold(cold).first, Cold(cold).last) == (1, 16_383)
    trim(log)
    assert await replayed(log) == before


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("stage", "times"), STAGES, ids=[f"{stage}-{times}" for stage, times in STAGES])
async def test_an_offload_killed_at_any_stage_is_done_again(tmp_path: Path, stage: str, times: int) -> None:
    log = make_log(tmp_path / "app.db", EVENTS)
    before = await replayed(log)
    child = start(log, stage, times)
    _, stderr = child.communicate(timeout=200)
    assert child.returncode == -signal.SIGKILL, stderr.decode()

    await check(log, before)


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_an_offload_killed_at_random_moments_with_all_of_spark_is_done_again(tmp_path: Path) -> None:
    moments = random.Random(random.SystemRandom().randrange(1 << 32))
    for number, stage in enumerate(("writing", "writing", "verifying", "verifying", "moving")):
        log = make_log(tmp_path / f"{number}.db", EVENTS)
        before = await replayed(log)
        child = start(log, stage, 0)
        assert child.stdout is not None
        assert child.stdout.readline().strip() == stage.encode()
        time.sleep(moments.random() * 3)  # the random moment
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate(timeout=20)

        await check(log, before)
