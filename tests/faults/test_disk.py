"""A disk that is full, and a disk that no longer syncs: real errors from the system, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent


def run(script: str, *args: object, before: tuple[str, ...] = ()) -> str:
    result = subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


FULL = """
    import asyncio, os, sys, zbus
    from pathlib import Path
    folder = Path(sys.argv[1])

    async def main():
        async with zbus.open(folder / "app.db") as bus:
            publisher = await bus.publisher("a/b")
            ballast = folder / "ballast"
            ballast.write_bytes(os.urandom(8 << 20))  # what an operator will delete
            async with bus.subscribe("**", start="beginning", overflow="spill") as subscription:
                acknowledged, refused = [], None
                try:
                    while True:
                        acknowledged += await publisher.publish_many([os.urandom(2000)] * 50)
                except zbus.LogFull as error:
                    refused = error
                assert refused is not None and "stored nothing" in str(refused), refused
                for _ in range(3):  # the error stays the same, and the loop keeps running
                    try:
                        await publisher.publish(os.urandom(100_000))
                        raise SystemExit("a publish without space was acknowledged")
                    except zbus.LogFull:
                        pass
                # Readers keep working, and no event is partly written.
                head = await bus.head()
                stored = [event.offset async for event in bus.replay()]
                assert stored == list(range(1, head + 1)), (len(stored), head)
                assert set(acknowledged) == set(stored), (len(acknowledged), len(stored))
                for _ in acknowledged:
                    await anext(subscription)
                # The log recovers once there is space.
                ballast.unlink()
                offset = await publisher.publish(b"again")
                assert offset == head + 1
                assert (await anext(subscription)).payload == b"again"
                print("recovered after", len(acknowledged))
        import zbus_log
        assert zbus_log.verify(str(folder / "app.db")).problems == []
    asyncio.run(main())
"""


def test_a_full_disk_refuses_new_events_keeps_the_old_ones_and_recovers_when_there_is_space(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=16m zbus-test "{tmp_path}" && exec "$0" "$@"'
    unshare = ("unshare", "--mount", "--map-root-user", "sh", "-c", mount)
    output = run(FULL, tmp_path, before=unshare)
    assert output.startswith("recovered after"), output
    assert int(output.split()[-1]) > 100


SYNC_FAILS = """
    import asyncio, sys, zbus
    from seccomp import let_syncing_fail

    async def main():
        async with zbus.open(sys.argv[1], close_timeout_s=5) as bus:
            publisher = await bus.publisher("a/b")
            before = [await publisher.publish(b"%d" % n) for n in range(10)]
            let_syncing_fail()
            for attempt in range(3):
                try:
                    await publisher.publish(b"never acknowledged")
                    raise SystemExit("a publish was acknowledged that was not synced")
                except zbus.LogWriterFailed as error:
                    assert "stopped (" in str(error) and "fsync" in str(error), error
            assert [event.offset async for event in bus.replay(until=10)] == before
        print("stopped")
    asyncio.run(main())
"""


def test_an_fsync_error_stops_the_writer_for_good_and_acknowledges_nothing(tmp_path: Path) -> None:
    assert run(SYNC_FAILS, tmp_path / "app.db") == "stopped\n"

    # Another process with a healthy disk finds everything that was acknowledged.
    again = run(
        """
        import asyncio, sys, zbus
        async def main():
            async with zbus.open(sys.argv[1]) as bus:
                events = [event async for event in bus.replay(until=10)]
                print([event.payload for event in events] == [b"%d" % n for n in range(10)])
                await (await bus.publisher("a/b")).publish(b"x")
        asyncio.run(main())
        """,
        tmp_path / "app.db",
    )
    assert again == "True\n"


def test_with_durability_os_there_is_no_sync_to_fail(tmp_path: Path) -> None:
    output = run(
        """
        import asyncio, sys, zbus
        from seccomp import let_syncing_fail
        async def main():
            async with zbus.open(sys.argv[1], durability="os") as bus:
                publisher = await bus.publisher("a/b")
                await publisher.publish(b"x")
                let_syncing_fail()
                print([await publisher.publish(b"x") for _ in range(3)])
        asyncio.run(main())
        """,
        tmp_path / "app.db",
    )
    assert output == "[2, 3, 4]\n"


def test_an_unreadable_or_foreign_file_is_refused_with_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is not a database, but it is long enough to look like one\n" * 100)
    output = run(
        """
        import asyncio, sys, zbus
        async def main():
            try:
                async with zbus.open(sys.argv[1]):
                    print("opened")
            except zbus.LogError as error:
                print(type(error).__name__, "Nothing was changed" in str(error))
        asyncio.run(main())
        """,
        tmp_path / "text.db",
    )
    assert output == "LogDamaged True\n"
