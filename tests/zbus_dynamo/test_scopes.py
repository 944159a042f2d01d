"""Keys, scopes and subjects of the Dynamo wire: one way there and back, and every match of an expression arrives."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbus.errors import EventInvalid, KeyInvalid, TransportUnsupported
from zbus.keys import check_expression, check_key, matches
from zbus_dynamo.scopes import (
    Scoped,
    check_expressions,
    encode_segment,
    place_of_key,
    place_of_subject,
    prefixes,
    subjects,
)

segment = st.text("ab.%-_é>*@", min_size=1, max_size=4).filter(lambda text: "*" not in text and text[0] != "@")
keys = st.lists(segment, min_size=2, max_size=4).map("/".join)
wild = st.lists(st.sampled_from(["a", "b", "*", "**", "a$*", "é."]), min_size=1, max_size=6).map("/".join)


@pytest.mark.parametrize(
    ("key", "kind", "subject", "path"),
    [
        ("ns/t", "namespace", "namespace.ns.t", "namespace/ns/topic/t"),
        (
            "ns/comp/kv-events",
            "component",
            "namespace.ns.component.comp.kv-events",
            "namespace/ns/component/comp/topic/kv-events",
        ),
        (
            "ns/comp/generate/kv_events.v1",
            "endpoint",
            "namespace.ns.component.comp.endpoint.generate.kv_events%2Ev1",
            "namespace/ns/component/comp/endpoint/generate/topic/kv_events%2Ev1",
        ),
        ("ü/t>", "namespace", "namespace.%C3%BC.t%3E", "namespace/%C3%BC/topic/t%3E"),
    ],
)
def test_a_key_has_one_scope_subject_and_path(key: str, kind: str, subject: str, path: str) -> None:
    place = place_of_key(key)

    assert (place.kind, place.subject, place.path) == (kind, subject, path)
    assert place.subject.startswith(place.subject_prefix + ".")
    assert place_of_subject(subject) == place
    assert place.key == key


def test_segments_keep_letters_digits_underscore_and_dash_and_encode_every_other_byte_in_upper_case() -> None:
    assert encode_segment("aZ09_-") == "aZ09_-"
    assert encode_segment("a.b c/ñ") == "a%2Eb%20c%2F%C3%B1"


@pytest.mark.parametrize("key", ["alone", "a/b/c/d/e", "a/b/c/d/e/f"])
def test_a_key_of_another_length_is_refused_and_the_lengths_are_named(key: str) -> None:
    with pytest.raises(KeyInvalid, match="2 to 4 segments"):
        place_of_key(key)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "ns",
        "namespace.ns",
        "component.ns.t",
        "namespace.ns.component.c",
        "namespace.ns.endpoint.e.t",
        "namespace.ns.component.c.endpoint.e.port.p.t",
        "namespace.a%2fb.t",
        "namespace.a%2Fb.t",
        "namespace.a%zz.t",
        "namespace.a%41.t",
        "namespace.%FF.t",
        "namespace.a%20b.t",
        "namespace.%40sys.t",
        "namespace..t",
        "namespace.a.",
        "namespace.a.%2A",
        "$SYS.REQ.t",
    ],
)
def test_a_subject_that_is_not_a_topic_of_a_scope_is_refused(subject: str) -> None:
    with pytest.raises(EventInvalid):
        place_of_subject(subject)


@given(st.text(max_size=40))
def test_no_subject_at_all_crashes_the_decoder(subject: str) -> None:
    try:
        place = place_of_subject(subject)
    except EventInvalid:
        return
    assert check_key(place.key)


@given(keys)
def test_keys_become_subjects_and_back_without_loss(key: str) -> None:
    place = place_of_key(key)

    assert place_of_subject(place.subject) == place
    assert re.fullmatch(r"[A-Za-z0-9_%.-]+", place.subject)


@given(st.lists(wild, min_size=1, max_size=3), keys)
def test_whatever_an_expression_matches_arrives_under_exactly_one_subject_and_prefix(
    expressions: list[str], key: str
) -> None:
    canonical = [check_expression(each) for each in expressions]
    if not any(matches(each, key) for each in canonical):
        return
    subject = place_of_key(key).subject

    assert sum(_nats_matches(pattern, subject) for pattern in subjects(canonical)) == 1
    assert sum(subject.encode().startswith(prefix) for prefix in prefixes(canonical)) == 1


def test_wildcards_become_nats_wildcards_and_double_ones_all_three_depths() -> None:
    assert subjects(["ns/*/t"]) == ["namespace.ns.component.*.t"]
    assert subjects(["ns/**"]) == [
        "namespace.ns.*",
        "namespace.ns.component.*.*",
        "namespace.ns.component.*.endpoint.*.*",
    ]
    assert subjects(["ns/comp/kv$*"]) == ["namespace.ns.component.comp.*"]


def test_a_namespace_is_not_its_components() -> None:
    assert subjects(["ns/t"]) == ["namespace.ns.t"]
    assert not matches("ns/t", Scoped(("ns", "comp"), "t").key)


def test_expressions_that_match_nothing_on_this_wire_are_named() -> None:
    with pytest.raises(TransportUnsupported, match="a/b/c/d/e") as caught:
        check_expressions("nats", ["ns/**", "a/b/c/d/e"])
    assert "2 to 4 segments" in str(caught.value)


def _nats_matches(pattern: str, subject: str) -> bool:
    wanted, found = pattern.split("."), subject.split(".")
    return len(wanted) == len(found) and all(a in ("*", b) for a, b in zip(wanted, found, strict=True))
