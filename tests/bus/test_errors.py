"""The tree of errors: complete, documented, exported, and the same on the other side of a pickle."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import Any

import pytest

import zbus
from zbus import errors

EVENT = zbus.Event(1, 2, 3, "a/b", b"x", {"h": "v"}, 4)
UNSTORED = zbus.Event(1, 2, 3, "a/b", b"x", {"h": "v"})

# One example of each class, with every field set.
EXAMPLES: list[errors.ZbusError] = [
    errors.ZbusError("something"),
    errors.ConfigInvalid("mode", "no such mode"),
    errors.BusClosed("publish", "the process was forked"),
    errors.WrongLoop("publish"),
    errors.EventInvalid("malformed envelope"),
    errors.KeyInvalid("a//b", "it has an empty segment"),
    errors.EventTooLarge("payload", 11, 10),
    errors.PayloadInvalid("not a dict", EVENT),
    errors.SchemaInvalid("a/b", "a/*", "id: missing", b"{}", "0123abcd", EVENT),
    errors.SchemaError("a/*", "it is not JSON"),
    errors.SchemaConflict("a/*", 3, "0123abcd", ("$.id: now required", "$.name: type narrowed")),
    errors.LogError("the disk is gone"),
    errors.LogRequired("replay"),
    errors.LogReadOnly("app.db"),
    errors.LogLocked("app.db", 4711),
    errors.LogFull("app.db"),
    errors.LogWriterFailed("app.db", "fsync failed"),
    errors.IdentityConflict(7, 3, "a/b", 12),
    errors.LogDamaged("app.db", "truncated", (5, 9)),
    errors.LogTrimmed(3, 8),
    errors.EventCorrupt(12, "bad checksum"),
    errors.CursorError("billing", "in use by process 4711"),
    errors.TransportError("zenoh could not send"),
    errors.TransportUnsupported("nats+raw", "requests to other nodes"),
    errors.SessionTokenInvalid("it has expired"),
    errors.RequestError("no answer"),
    errors.NoResponders("prices/quote"),
    errors.RequestTimeout("prices/quote", 2.5),
    errors.HandlerFailed("prices/quote", "KeyError", "'sku'"),
    errors.SubscriberLagged(("a/**", "b"), 3, 5, 9, 1000),
]

CLASSES = [
    each
    for each in vars(errors).values()
    if inspect.isclass(each) and issubclass(each, BaseException) and each.__module__ == errors.__name__
]
by_name = pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
each_class = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)


def fields(error: errors.ZbusError) -> dict[str, Any]:
    return vars(error)


def test_every_class_has_an_example_here() -> None:
    assert sorted(kind.__name__ for kind in CLASSES) == sorted(type(error).__name__ for error in EXAMPLES)


@each_class
def test_every_error_is_exported_by_zbus(kind: type[errors.ZbusError]) -> None:
    assert getattr(zbus, kind.__name__) is kind
    assert kind.__name__ in zbus.__all__


@each_class
def test_every_error_is_caught_as_a_zbus_error(kind: type[errors.ZbusError]) -> None:
    assert issubclass(kind, errors.ZbusError)
    assert not issubclass(kind, (OSError, ValueError, RuntimeError))


@each_class
def test_every_error_says_what_is_true_in_a_docstring_of_its_own(kind: type[errors.ZbusError]) -> None:
    assert "__doc__" in vars(kind)
    assert kind.__doc__
    assert len(kind.__doc__) > 20


@by_name
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_every_error_pickles_with_its_fields_and_the_same_words(error: errors.ZbusError, protocol: int) -> None:
    error.add_note("7 events of this call were stored")

    twin = pickle.loads(pickle.dumps(error, protocol))

    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert fields(twin) == fields(error)
    assert twin.__notes__ == error.__notes__


@by_name
def test_every_error_has_the_fields_that_it_was_made_with(error: errors.ZbusError) -> None:
    parameters = list(inspect.signature(type(error).__init__).parameters)[1:]

    if "args" not in parameters and "fields" not in parameters:
        assert [getattr(error, name) for name in parameters] == list(error.args)


@by_name
def test_every_error_speaks_in_words_and_not_in_a_tuple(error: errors.ZbusError) -> None:
    text = str(error)

    assert text
    assert not text.startswith("(")
    assert "object at 0x" not in text


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.LogLocked("app.db", 4711), "process 4711"),
        (errors.LogDamaged("app.db", "truncated", (5, 9)), "offsets 5 to 9"),
        (errors.LogTrimmed(3, 8), "after offset 3 up to 8"),
        (errors.LogFull("app.db"), "stored nothing"),
        (errors.LogWriterFailed("app.db", "EIO"), "outcome of this event is unknown"),
        (errors.EventCorrupt(12, "bad"), "offset 12"),
        (errors.EventTooLarge("payload", 2_000, 1_000), "2,000 bytes exceeds the limit of 1,000; not stored"),
        (errors.SubscriberLagged(("a/**",), 3, 5, 9, 10), "replay after offset 5 until 9"),
        (errors.SubscriberLagged(("a/**",), 3, 0, 0, 10), "no log to replay them from"),
        (errors.PayloadInvalid("not a dict"), "not stored"),
        (errors.PayloadInvalid("not a dict", EVENT), "the log still has it"),
        (
            errors.PayloadInvalid("not a dict", UNSTORED),
            "event on 'a/b': not a dict; it is not stored on this node",
        ),
        (errors.LogRequired("replay"), "zbus.open('app.db')"),
        (errors.BusClosed("publish"), "cannot publish: the bus is not open"),
        (errors.BusClosed("publish", "it was forked"), "cannot publish: it was forked; this call stored"),
        (errors.WrongLoop("publish"), "cannot publish here"),
        (errors.IdentityConflict(7, 3, "a/b", 12), "on 'a/b' at offset 12"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_says_what_is_true_of_the_data_or_what_to_do(error: errors.ZbusError, words: str) -> None:
    assert words in str(error)


def test_a_damaged_log_without_known_offsets_names_none() -> None:
    assert "missing: offsets" not in str(errors.LogDamaged("app.db", "not a database"))


def test_the_tree_in_the_docstring_names_every_class_under_its_parent() -> None:
    drawn: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^ {4}([│├└─ ]*)([A-Z]\w+)(?:\s{2,}\S.*)?$", line)
        if found is None:
            continue
        depth, name = len(found[1]), found[2]
        while parents and parents[-1][0] >= depth:
            parents.pop()
        assert name not in drawn, f"{name} is drawn twice"
        drawn[name] = parents[-1][1] if parents else "Exception"
        parents.append((depth, name))

    assert drawn == {kind.__name__: kind.__bases__[0].__name__ for kind in CLASSES}
