"""Keys as NATS subjects: one to one, and with zbus's wildcards on top of NATS's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbus.errors import KeyInvalid
from zbus.keys import KeySet, check_expression
from zbus_nats.subjects import ENCODED, PLAIN, Spelling, SubjectInvalid, cover, decode_subject, encode_key

SPELLINGS = [ENCODED, PLAIN]

# Few letters, so that expressions and keys meet; and the ones that mean something to somebody.
letters = st.text(alphabet="ab.>%@_-:é🚀", min_size=1, max_size=3)
segments = st.one_of(letters, st.sampled_from(["a", "b", "@x", "_INBOX", "%2E", "a.b", ">", "$JS".replace("$", "")]))
keys = st.lists(segments, min_size=1, max_size=5).map("/".join)
pieces = st.one_of(segments, st.sampled_from(["*", "**", "a$*", "$*b", "a$*b"]))
raw_expressions = st.lists(pieces, min_size=1, max_size=5).map("/".join)


def canonical(text: str) -> str | None:
    try:
        return check_expression(text)
    except KeyInvalid:
        return None


expressions = raw_expressions.map(canonical).filter(lambda each: each is not None).map(str)


def nats_matches(pattern: str, subject: str) -> bool:
    """NATS's own rules, written down once more."""
    wanted, tokens = pattern.split("."), subject.split(".")
    for at, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > at
        if at >= len(tokens) or token not in ("*", tokens[at]):
            return False
    return len(wanted) == len(tokens)


@pytest.mark.parametrize("spelling", SPELLINGS)
@given(key=keys)
def test_a_key_comes_back_from_its_subject(spelling: Spelling, key: str) -> None:
    subject = spelling.encode(key)

    assert spelling.decode(subject) == key
    assert len(subject.split(".")) == len(key.split("/"))
    assert not set(subject) & set("*> \t\r\n")


@given(one=keys, other=keys)
def test_two_keys_never_share_a_subject(one: str, other: str) -> None:
    assert (encode_key(one) == encode_key(other)) == (one == other)
    assert (PLAIN.encode(one) == PLAIN.encode(other)) == (one == other)


@pytest.mark.parametrize("spelling", SPELLINGS)
@settings(max_examples=300)
@given(wanted=st.lists(expressions, min_size=1, max_size=5), key=keys)
def test_the_server_and_the_filter_together_are_exact_and_bring_nothing_twice(
    spelling: Spelling, wanted: list[str], key: str
) -> None:
    subjects, exact = spelling.cover(wanted), KeySet(wanted)
    subject = spelling.encode(key)

    arrives = sum(nats_matches(each, subject) for each in subjects)

    assert arrives <= 1, f"{key} would come {arrives} times through {subjects}"
    delivered = bool(arrives) and spelling.decode(subject) in exact
    assert delivered == (key in exact)


@pytest.mark.parametrize("spelling", SPELLINGS)
@given(subject=st.one_of(st.text(max_size=30), st.text(alphabet="ab%2E0F./*>@$ é", max_size=20)))
def test_a_hostile_subject_is_refused_or_is_the_one_spelling_of_its_key(spelling: Spelling, subject: str) -> None:
    try:
        key = spelling.decode(subject)
    except SubjectInvalid:
        return
    assert spelling.encode(key) == subject


@pytest.mark.parametrize(
    "subject",
    ["", ".", "a..b", "a.", "a%2Fb", "a%2eb", "a%41", "%FF", "a%", "a%2", "a b", "*", "a.>", "%2A", "_INBOX.x", "a%00"],
)
def test_a_subject_that_is_no_keys_is_refused(subject: str) -> None:
    with pytest.raises(SubjectInvalid):
        decode_subject(subject)


@pytest.mark.parametrize("key", ["", "/", "a//b", "a/*", "a/**", "a\r\nPUB x 1\r\nx", "a b", "$SYS"])
def test_what_is_no_concrete_key_has_no_subject(key: str) -> None:
    with pytest.raises(KeyInvalid):
        encode_key(key)


def test_an_inbox_is_never_a_keys_subject() -> None:
    assert encode_key("_INBOX/abc") == "%5FINBOX.abc"
    assert PLAIN.encode("_INBOX/abc") == "%5FINBOX.abc"
    assert cover(["_INBOX/*"]) == {"%5FINBOX.*"}


def test_a_thousand_expressions_take_a_thousand_subjects_and_no_long_time() -> None:
    found = cover([f"shop/{number}/*" for number in range(1_000)] + ["shop/7/orders", "audit/**"])

    assert len(found) == 1_002
