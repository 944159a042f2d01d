"""The file registry: leases, heartbeats, the reaper, and what other users may not do to it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq_support import children, until

from zbus.config import BusConfig
from zbus.errors import ConfigInvalid
from zbus.observe.counters import Counters
from zbus_zmq.address.options import read_options
from zbus_zmq.find.discovery import NodeRecord, Nodes
from zbus_zmq.find.file_registry import FileRegistry
from zbus_zmq.find.lease import decode_lease, encode_lease, take_lease


@contextmanager
def registry(folder: Path, **options: Any) -> Iterator[FileRegistry]:
    query = "".join(f"&{name}={value}" for name, value in options.items())
    made = FileRegistry(read_options(BusConfig(), f"zmq://?registry={folder}{query}"), Counters("test"))
    try:
        yield made
    finally:
        made.close()


def node(name: str, *answers: str) -> NodeRecord:
    return NodeRecord(node=name, publish=f"tcp://127.0.0.1:{len(name)}", requests="tcp://127.0.0.1:2", serves=answers)


class Watch:
    def __init__(self) -> None:
        self.nodes: list[Nodes] = []

    def __call__(self, nodes: Nodes) -> None:
        self.nodes.append(nodes)

    def sees(self, *names: str) -> Callable[[], bool]:
        return lambda: bool(self.nodes) and self.nodes[-1].keys() == set(names)


def test_a_node_is_seen_by_others_when_it_is_announced_and_not_after_it_closes(tmp_path: Path) -> None:
    watch = Watch()
    with registry(tmp_path) as here:
        here.watch(watch)
        with registry(tmp_path) as there:
            there.announce(node("aa"))
            assert here.look() == {"aa": node("aa")}
            assert until(watch.sees("aa"))
            there.announce(node("aa", "svc/x"))
            assert until(lambda: watch.nodes[-1]["aa"].serves == ("svc/x",))
        assert until(watch.sees())
    assert list(tmp_path.iterdir()) == []


def test_a_lease_says_who_took_it_when_and_when_it_last_gave_a_sign_of_life(tmp_path: Path) -> None:
    with registry(tmp_path, lease_s=0.5) as here:
        here.announce(node("aa"))
        (path,) = tmp_path.glob("*.json")
        first = json.loads(path.read_bytes())
        assert until(lambda: json.loads(path.read_bytes())["last_heartbeat_at"] > first["last_heartbeat_at"])
        later = json.loads(path.read_bytes())

    assert f"process {os.getpid()}" in first["allocated_by"]
    assert later["allocated_at"] == first["allocated_at"] <= first["last_heartbeat_at"]
    assert path.name == "aa.json"


def test_a_lease_without_a_heartbeat_expires_and_is_removed(tmp_path: Path) -> None:
    watch = Watch()
    path = tmp_path / "silent.json"
    path.write_bytes(encode_lease(take_lease("default", node("silent"), 1.5)))
    with registry(tmp_path) as here:
        here.watch(watch)
        assert until(watch.sees("silent"))
        assert until(watch.sees(), 3)
        assert path.exists()  # ignored first, then removed
        assert until(lambda: not path.exists(), 5)


def test_the_lease_of_a_killed_process_ends_with_it(tmp_path: Path) -> None:
    watch = Watch()
    with registry(tmp_path) as here, children() as start:
        here.watch(watch)
        child = start("hold", f"zmq://?registry={tmp_path}&lease_s=3600")
        child.wait_for("diagnostics")
        assert until(lambda: bool(watch.nodes) and len(watch.nodes[-1]) == 1)

        child.kill()

        assert until(watch.sees(), 3)


def test_the_lease_of_an_earlier_boot_is_void(tmp_path: Path) -> None:
    lease = msgspec.structs.replace(take_lease("default", node("old"), 3600), boot="another")
    (tmp_path / "old.json").write_bytes(encode_lease(lease))
    with registry(tmp_path) as here:
        assert here.look() == {}
        assert not (tmp_path / "old.json").exists()


def test_a_node_whose_file_or_folder_was_removed_comes_back_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    watch = Watch()
    with registry(folder, lease_s=0.6) as here:
        here.announce(node("aa"))
        here.watch(watch)
        assert until(watch.sees("aa"))
        shutil.rmtree(folder)

        assert until(lambda: (folder / "aa.json").exists(), 3)
        assert until(watch.sees("aa"), 3)
        assert until(lambda: here.diagnostics()["problem"] == "", 3)


def test_a_registry_that_fails_is_seen_in_the_diagnostics_and_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    with registry(folder) as here:
        here.announce(node("aa"))
        shutil.rmtree(folder)
        folder.write_text("in the way")
        assert until(
            lambda: "NotADirectory" in here.diagnostics()["problem"] or "FileExists" in here.diagnostics()["problem"]
        )
        folder.unlink()

        assert until(lambda: here.diagnostics()["problem"] == "" and (folder / "aa.json").exists(), 10)
        shutil.rmtree(folder)
        folder.write_text("in the way of closing")


def test_nodes_of_another_realm_are_not_seen(tmp_path: Path) -> None:
    with registry(tmp_path, realm="one") as one, registry(tmp_path, realm="two") as two:
        one.announce(node("aa"))
        two.announce(node("bb"))

        assert one.look().keys() == {"aa"}
        assert two.look().keys() == {"bb"}


def test_a_new_node_is_seen_at_once_however_close_it_follows_another(tmp_path: Path) -> None:
    watch = Watch()
    with registry(tmp_path) as here:
        here.watch(watch)
        took: list[float] = []
        for number in range(20):
            before = time.monotonic()
            (tmp_path / f"n{number}.json").write_bytes(encode_lease(take_lease("default", node(f"n{number}"), 3600)))
            assert until(lambda name=f"n{number}": bool(watch.nodes) and name in watch.nodes[-1])
            took.append(time.monotonic() - before)

    assert sorted(took)[10] < 0.3, took  # sooner than the scan that looks at everything, half a second apart


JOIN = """
import sys
from zbus.config import BusConfig
from zbus.observe.counters import Counters
from zbus_zmq.find.discovery import NodeRecord
from zbus_zmq.address.options import read_options
from zbus_zmq.find.file_registry import FileRegistry

name, folder = FOLDER_AND_NAME
counts = Counters("test")
made = FileRegistry(read_options(BusConfig(), f"zmq://?registry={folder}"), counts)
print("ready", flush=True)
sys.stdin.readline()
for turn in range(200):
    made.announce(NodeRecord(node=name, requests=f"tcp://127.0.0.1:{turn + 1}", serves=("svc/x",) * (turn % 7)))
    made.look()
print(f"done {sorted(made.look())} {counts.snapshot()}", flush=True)
sys.stdin.read()
made.close()
"""


def test_processes_that_announce_themselves_at_once_and_again_and_again_are_all_seen_whole(tmp_path: Path) -> None:
    names = [f"n{number}" for number in range(6)]
    watch = Watch()
    with registry(tmp_path) as here, children() as start:
        here.watch(watch)
        joining = [start("run", JOIN.replace("FOLDER_AND_NAME", repr((name, str(tmp_path))))) for name in names]
        for child in joining:
            child.wait_for("ready")
        for child in joining:
            child.say("go")
        while not all(any(line.startswith("done") for line in child.lines) for child in joining):
            assert all(child.process.poll() is None for child in joining)
            here.look()

        assert here.look().keys() == set(names)
        assert {each.requests for each in here.look().values()} == {"tcp://127.0.0.1:200"}
        assert until(watch.sees(*names))
        assert here._counts.snapshot() == {}, "a file was seen that was not whole"
        last = [child.wait_for("done") for child in joining]
        assert all(line.endswith("{}") for line in last), last
        for child in joining:
            assert child.end() == 0
        assert here.look() == {}
        assert not list(tmp_path.iterdir())


def test_the_folder_and_its_files_are_for_the_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with registry(folder) as here:
        here.announce(node("aa"))

        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "aa.json").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)

    with pytest.raises(ConfigInvalid, match="everybody"):
        FileRegistry(read_options(BusConfig(), f"zmq://?registry={tmp_path}"), Counters("test"))


def test_the_default_folder_is_private_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = FileRegistry(read_options(BusConfig(), "zmq://"), Counters("test"))
    made.close()

    assert made.folder == tmp_path / "zbus-zmq"
    assert made.folder.stat().st_mode & 0o777 == 0o700


def test_files_that_are_no_leases_are_counted_and_passed_over(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(b"{")
    (tmp_path / "list.json").write_bytes(b"[]")
    (tmp_path / "folder.json").mkdir()
    counts = Counters("test")
    made = FileRegistry(read_options(BusConfig(), f"zmq://?registry={tmp_path}"), counts)
    try:
        made.announce(node("aa"))
        assert made.look().keys() == {"aa"}
        assert counts.snapshot()["registry_record_invalid"] == 2
    finally:
        made.close()


@settings(deadline=None)
@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)).map(
        msgspec.json.encode
    )
)
def test_no_bytes_make_the_reader_of_leases_fail(data: bytes) -> None:
    found = decode_lease(data)

    assert found is None or decode_lease(encode_lease(found)) == found


def test_what_cannot_be_read_or_removed_is_reported_and_the_other_nodes_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.draft").mkdir()
    os.utime(tmp_path / "x.draft", (1, 1))
    (tmp_path / "secret.json").write_bytes(b"{}")
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "secret.json":
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with registry(tmp_path) as here, registry(tmp_path) as there:
        there.announce(node("aa"))

        assert here.look() == {"aa": node("aa")}
        assert here._counts.snapshot()["registry_record_invalid"] >= 2
