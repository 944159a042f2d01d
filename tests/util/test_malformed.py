"""All that can be wrong with encoded input is caught by one list of errors."""

from __future__ import annotations

import msgspec
import pytest

from zbus.util.malformed import MALFORMED


class Named(msgspec.Struct):
    name: str


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x81\xa4name\x07", b"\x81\xa4name\xa1\xff", b"\x81\xa1x" + b"\x91" * 100_000 + b"\x01"],
    ids=["empty", "no msgpack", "another type", "not UTF-8", "nested too deeply"],
)
def test_malformed_input_raises_one_of_these_errors(data: bytes) -> None:
    with pytest.raises(MALFORMED):
        msgspec.msgpack.decode(data, type=Named)
