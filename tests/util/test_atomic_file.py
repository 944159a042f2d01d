"""A file is replaced whole or not at all, and a durable one is on disk before the call returns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zbus.util.atomic_file import sync, write_atomically


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path, durable: bool) -> None:
    path, temporary = tmp_path / "a.json", tmp_path / ".a.json.1"

    write_atomically(path, b"old", temporary, durable=durable)
    write_atomically(path, b"new", temporary, durable=durable)

    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_durable_file_is_synced_before_it_is_renamed_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, steps, fsync = tmp_path / "a.json", list[tuple[str, bool]](), os.fsync

    def synced(descriptor: int) -> None:
        steps.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    write_atomically(path, b"x", tmp_path / "draft", durable=True)

    assert steps == [(str(tmp_path / "draft"), False), (str(tmp_path), True)]


def test_a_failed_write_keeps_the_old_file_and_removes_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new", tmp_path / "draft", durable=True)

    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_does_not_exist_cannot_be_synced(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "missing")
