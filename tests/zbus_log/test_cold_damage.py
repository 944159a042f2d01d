"""The cold tier when something is wrong with it: its files, its manifest, or the log it belongs to."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from cold_support import EVENTS, epoch_of, fill, follow, offload, offsets, opened, trim, write_file, write_segment
from mesh_fakes import recorded

from zbus.errors import ConfigInvalid, EventCorrupt, LogDamaged, LogError
from zbus.keys import KeySet
from zbus.ports.log import Span
from zbus_log import Cold, ColdDamaged, ColdFile, Manifest, Segment

EPOCH = bytes(range(16))


def a_file(log_path: Path) -> Path:
    """The largest file of the first segment."""
    return max(
        Path(f"{log_path}-cold").glob("seg=00000000000000000001-*/*/*/*.parquet"), key=lambda path: path.stat().st_size
    )


def rewrite(path: Path, offset: int, column: int, value: Any) -> None:
    """Change one value, as a bad disk would that got past Parquet's own checks."""
    rows = [list(row.values()) for row in pq.ParquetFile(path).read().to_pylist()]
    changed = next(row for row in rows if row[0] == offset)
    changed[column] = value
    write_file(path, rows)


@pytest.mark.parametrize(
    ("column", "value"),
    [(7, b"other"), (7, None), (4, 5), (1, None), (9, 1), (1, "shop/other"), (6, b"\x81\xa1h\xa1v")],
    ids=str,
)
def test_an_event_that_fails_its_checksum_is_reported_and_skipped_on_request(
    log_path: Path, column: int, value: Any
) -> None:
    fill(log_path)
    with opened(log_path) as log:
        offload(log_path, 300)
        trim(log, 300)
        path = a_file(log_path)
        bad = pq.ParquetFile(path).read().column("offset").to_pylist()[4]
        rewrite(path, bad, column, value)
        page = log.read(KeySet.all(), Span(bad - 3), 10)

        events, error, skipped = page.events()
        assert (offsets(events), skipped) == ([bad - 2, bad - 1], 0)
        assert isinstance(error, EventCorrupt)
        assert error.offset == bad
        events, error, skipped = page.events(skip_corrupt=True)
        assert (error, skipped) == (None, 1)
        assert bad not in offsets(events)
        assert bad + 1 in offsets(events)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in range(40, 200):
        data[place] ^= 0xFF
    path.write_bytes(data)


def lose_rows(path: Path) -> None:
    pq.write_table(pq.ParquetFile(path).read().slice(1), path)


def turn_round(path: Path) -> None:
    pq.write_table(pq.ParquetFile(path).read().sort_by([("offset", "descending")]), path)


def drop_column(path: Path) -> None:
    pq.write_table(pq.ParquetFile(path).read().drop(["checksum"]), path)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (Path.unlink, "the file is missing"),
        (cut_short, "it cannot be read"),
        (flip, "it cannot be read"),
        (lose_rows, "events, not"),
        (turn_round, "not in order"),
        (drop_column, "its column 'checksum' is missing"),
    ],
    ids=["missing", "cut short", "flipped", "rows lost", "not in order", "no checksums"],
)
def test_a_damaged_file_is_named_with_its_range_and_what_to_do(log_path: Path, harm: Any, reason: str) -> None:
    fill(log_path)
    with opened(log_path) as log:
        cold = offload(log_path, 300, 600)
        trim(log, 600)
        file = next(each for each in cold.segments[0].files if cold.folder / each.path == a_file(log_path))
        path = cold.folder / file.path
        harm(path)

        with pytest.raises(ColdDamaged, match=reason) as caught:
            follow(log, KeySet.all())
        assert caught.value.path == str(path)
        assert caught.value.missing == (file.first, file.last)
        assert f"after={file.last}" in str(caught.value)
        assert "--accept-loss" not in str(caught.value)
        assert offsets(follow(log, KeySet.all(), Span(300))) == list(range(301, EVENTS + 1))


# The manifest.


def segment(first: int, last: int, digest: str = "d") -> Segment:
    file = ColdFile(f"seg={first}-{last}/x.parquet", last - first + 1, first, last)
    return Segment(first, last, last - first + 1, digest, 0, 9, 100, (file,))


def test_segments_are_added_at_the_end_only_and_the_same_ones_again_change_nothing(tmp_path: Path) -> None:
    cold = Cold(tmp_path / "tier")
    assert (cold.first, cold.last, cold.segments) == (0, 0, ())
    page = cold.read(KeySet.all(), Span(), 10)
    assert (page.events(), page.covered, page.low_water) == (([], None, 0), 0, 0)
    with pytest.raises(ConfigInvalid, match="epoch"):
        cold.add([segment(5, 9)])

    cold.add([segment(5, 9), segment(10, 12)], EPOCH)
    before = cold.path.stat().st_mtime_ns
    cold.add([segment(5, 9), segment(10, 12)], EPOCH)
    assert cold.path.stat().st_mtime_ns == before
    cold.add([segment(10, 12), segment(13, 13)])

    assert (cold.first, cold.last) == (5, 13)
    assert Cold(tmp_path / "tier").segments == (segment(5, 9), segment(10, 12), segment(13, 13))
    for wrong in (segment(16, 20), segment(13, 14), segment(1, 4), segment(10, 12, "other")):
        with pytest.raises(LogError, match="was not added"):
            cold.add([segment(14, 14), wrong])
    assert cold.last == 13
    assert os.listdir(tmp_path / "tier") == ["manifest.json"]


def manifest(**changes: Any) -> dict[str, Any]:
    made = msgspec.to_builtins(Manifest(1, EPOCH.hex(), (segment(1, 5), segment(6, 9))))
    return made | changes


def with_segments(*segments: Segment) -> dict[str, Any]:
    return manifest(segments=msgspec.to_builtins(segments))


def with_file(path: str, first: int = 1, last: int = 5) -> dict[str, Any]:
    return with_segments(msgspec.structs.replace(segment(1, 5), files=(ColdFile(path, 5, first, last),)))


REFUSED = {
    "not JSON": (b"{", "the manifest is malformed"),
    "not text": (b"\xff\xfe", "the manifest is malformed"),
    "no manifest": (b'{"a": 1}', "the manifest is malformed"),
    "newer": (manifest(version=2, segments="in another form"), "Upgrade zbus"),
    "no epoch": (manifest(epoch=""), "epoch"),
    "overlap": (with_segments(segment(1, 5), segment(5, 9)), "does not follow the one that ends at 5"),
    "hole": (with_segments(segment(1, 5), segment(7, 9)), "does not follow the one that ends at 5"),
    "backwards": (with_segments(msgspec.structs.replace(segment(1, 5), last=0)), "not a range"),
    "absolute": (with_file("/etc/passwd"), "outside the tier's folder"),
    "above": (with_file("seg=1/../../x.parquet"), "outside the tier's folder"),
    "not in its segment": (with_file("x.parquet", 1, 6), "are not within the segment 1 to 5"),
    "events": (with_segments(msgspec.structs.replace(segment(1, 5), events=4)), "a different number"),
}


@pytest.mark.parametrize(("content", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_manifest_that_is_not_sound_is_refused_by_name(log_path: Path, content: Any, reason: str) -> None:
    fill(log_path)
    path = Path(f"{log_path}-cold") / "manifest.json"
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
    with opened(log_path) as log:
        trim(log, 5)
        for attempt in (log.low_water, lambda: log.read(KeySet.all(), Span(), 10), lambda: log.narrow(Span(3))):
            with pytest.raises(LogDamaged, match=reason) as caught:
                attempt()
            assert caught.value.path == str(path)
            again = pickle.loads(pickle.dumps(caught.value))
            assert str(again) == str(caught.value)
        assert offsets(follow(log, KeySet.all(), Span(5))) == list(range(6, EVENTS + 1))


def test_a_manifest_that_was_there_and_is_gone_is_reported_rather_than_taken_for_an_empty_tier(log_path: Path) -> None:
    fill(log_path)
    with opened(log_path) as log:
        cold = offload(log_path, 500)
        trim(log, 500)
        assert log.low_water() == 0
        cold.path.unlink()
        with pytest.raises(ColdDamaged, match="was removed"):
            follow(log, KeySet.all())


def test_a_tier_of_another_log_is_refused_until_it_is_adopted(log_path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    fill(log_path)
    fill(other)
    with opened(log_path, cold_dir=f"{other}-cold") as log:
        offload(other, 500)
        trim(log, 500)
        for attempt in (log.low_water, lambda: follow(log, KeySet.all()), lambda: follow(log, KeySet.all(), Span(9))):
            with pytest.raises(ColdDamaged, match="belongs to another log") as caught:
                attempt()
            assert caught.value.missing == (1, 500)
        assert offsets(follow(log, KeySet.all(), Span(500))) == list(range(501, EVENTS + 1))
        with pytest.raises(ColdDamaged, match="belongs to another log"):
            Cold(f"{other}-cold").add([write_segment(log_path, tmp_path, 501, 600)], epoch_of(log_path))

        Cold(f"{other}-cold").adopt(epoch_of(log_path))
        assert offsets(follow(log, KeySet.all())) == list(range(1, EVENTS + 1))
    with pytest.raises(ConfigInvalid, match="no tier"):
        Cold(tmp_path / "none").adopt(EPOCH)


def test_a_log_that_lost_its_end_keeps_its_tier_in_the_new_epoch(log_path: Path) -> None:
    fill(log_path)
    with opened(log_path) as log:
        offload(log_path, 500)
        trim(log, 500)
        before = epoch_of(log_path)
    Path(f"{log_path}-head").unlink()
    with opened(log_path, accept_loss=True) as log:
        assert epoch_of(log_path) != before
        assert offsets(follow(log, KeySet.all())) == list(range(1, EVENTS + 1))


def test_a_tier_that_holds_what_its_log_lost_is_left_as_it_is(log_path: Path) -> None:
    cold = Cold(log_path.parent / "tier")
    cold.add([segment(1, 9)], EPOCH)
    cold.follow(EPOCH, b"x" * 16, 8)
    assert cold.manifest().epoch == EPOCH.hex()
    cold.follow(EPOCH, b"x" * 16, 9)
    assert cold.manifest().epoch == (b"x" * 16).hex()


def test_a_damaged_tier_does_not_keep_a_log_from_opening_after_a_loss(log_path: Path) -> None:
    fill(log_path)
    Path(f"{log_path}-cold").mkdir()
    (Path(f"{log_path}-cold") / "manifest.json").write_bytes(b"?")
    Path(f"{log_path}-head").unlink()
    with recorded() as records, opened(log_path, accept_loss=True) as log:
        assert offsets(follow(log, KeySet.all())) == list(range(1, EVENTS + 1))

    found = {each["record"]: each.get("code") for each in records}
    assert found["LOG_TRUNCATED"] == "log_truncated"
    assert found["LOG_COLD_LEFT_BEHIND"] == "cold_tier_not_adopted"
