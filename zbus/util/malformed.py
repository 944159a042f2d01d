"""The errors that decoding malformed input raises."""

from __future__ import annotations

import msgspec

# A ValidationError of msgspec is a DecodeError. Text that is not UTF-8 and deep nesting raise errors of Python.
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
