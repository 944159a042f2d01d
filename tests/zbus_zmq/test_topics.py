"""Keys as ZMQ topics: no two keys share one, and a prefix never leaves out what an expression matches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbus.errors import KeyInvalid
from zbus.keys import check_expression, check_key, matches
from zbus_zmq.address.raw_topics import key_from, topic_from, topic_prefix
from zbus_zmq.address.topics import key_of, mark_of, node_of, prefix_of, topic_of, widest

SEGMENT = st.text(st.sampled_from("ab.%@>é🙂-_~0") | st.characters(codec="utf-8"), min_size=1, max_size=6)


def is_key(key: str) -> bool:
    try:
        check_key(key)
    except KeyInvalid:
        return False
    return True


KEYS = st.lists(SEGMENT, min_size=1, max_size=4).map("/".join).filter(is_key)
PIECES = st.sampled_from(["a", "b", "ab", "a%", "é", "*", "**", "a$*", "$*b", "a$*b", "@x"])
EXPRESSIONS = st.lists(PIECES, min_size=1, max_size=4).map("/".join).map(check_expression)
NEAR_KEYS = st.lists(st.sampled_from(["a", "b", "ab", "axb", "a%", "é", "@x"]), min_size=1, max_size=5).map("/".join)


@settings(deadline=None)
@given(KEYS)
def test_a_key_survives_the_way_to_its_topic_and_back(key: str) -> None:
    assert key_of(topic_of(key)) == key


@settings(deadline=None)
@given(KEYS, KEYS)
def test_the_topic_of_a_key_is_never_the_beginning_of_another(one: str, other: str) -> None:
    assert topic_of(other).startswith(topic_of(one)) == (one == other)


@settings(deadline=None)
@given(EXPRESSIONS, NEAR_KEYS)
def test_the_prefix_of_an_expression_lets_through_whatever_it_matches(expression: str, key: str) -> None:
    if matches(expression, key):
        assert topic_of(key).startswith(prefix_of(expression))


@settings(deadline=None)
@given(st.binary(max_size=80) | KEYS.map(topic_of).map(lambda topic: topic[:-1] + b"x\x00"))
def test_bytes_that_are_no_topic_have_no_key(data: bytes) -> None:
    key = key_of(data)

    assert key is None or topic_of(key) == data


def test_only_the_widest_of_several_prefixes_are_subscribed_to() -> None:
    assert widest([b"a/b/", b"a/", b"a/b/c/\0", b"b/"]) == {b"a/", b"b/"}
    assert widest([b"", b"a"]) == {b""}
    assert widest([]) == set()


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_bytes_that_are_no_mark_name_no_node(data: bytes) -> None:
    found = node_of(data)

    assert found is None or (data[:1] == b"\xff" and len(found[0]) > 0)
    assert node_of(mark_of("0123456789abcdef", 7)) == ("0123456789abcdef", 7)


@settings(deadline=None)
@given(st.text(max_size=30).map(lambda text: text.encode("utf-8", "surrogatepass")), st.sampled_from("/."))
def test_a_plain_topic_that_has_a_key_is_found_again_from_it(topic: bytes, separator: str) -> None:
    key = key_from(topic, separator)

    if key is not None:
        assert check_key(key) == key
        assert topic_from(key, separator) == topic


@settings(deadline=None)
@given(KEYS, KEYS, st.sampled_from("/."))
def test_no_two_keys_share_a_plain_topic(one: str, other: str, separator: str) -> None:
    topic = topic_from(one, separator)

    if topic is not None and one != other:
        assert topic_from(other, separator) != topic


@settings(deadline=None)
@given(EXPRESSIONS, NEAR_KEYS, st.sampled_from("/."))
def test_the_prefix_of_plain_topics_lets_through_whatever_matches(expression: str, key: str, separator: str) -> None:
    topic = topic_from(key, separator) if is_key(key) else None

    if topic is not None and matches(expression, key):
        assert topic.startswith(topic_prefix(expression, separator))


@pytest.mark.parametrize("topic", [b"", b"a//b", b"/a", b"a/", b"\xff\xfe", b"a" * 2000])
def test_a_plain_topic_that_cannot_be_a_key_has_none(topic: bytes) -> None:
    assert key_from(topic, "/") is None
