"""Liveliness tokens of other nodes: whatever their keys hold, they are a node or they are counted."""

from __future__ import annotations

import base64
import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from zbus_zmq.find.discovery import NodeRecord
from zbus_zmq.find.tokens import assemble, tails_of

NODE = NodeRecord(node="ab" * 8, publish="tcp://127.0.0.1:1", requests="tcp://127.0.0.1:2", serves=("svc/a", "svc/ü"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.dictionaries(st.sampled_from([*NodeRecord.__struct_encode_fields__, "more"]), JSON, max_size=6)


def packed(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


OTHER_TAILS = st.one_of(
    st.text(max_size=30).filter(lambda text: not text.startswith("node/")),
    st.builds("{}/{}".format, st.sampled_from(["answers", "other", ""]), st.text(max_size=30)),
    st.binary(max_size=40).map(lambda data: f"answers/{packed(data)}"),
)
TAILS = OTHER_TAILS | st.one_of(
    st.text(max_size=30).map("node/{}".format),
    st.binary(max_size=40).map(lambda data: f"node/{packed(data)}"),
    FIELDS.map(lambda value: f"node/{packed(encoded(value | {'node': NODE.node}))}"),
    JSON.map(lambda value: f"node/{packed(encoded(value))}"),
)


def without_name(node: NodeRecord) -> set[str]:
    return {tail.removeprefix(f"{node.node}/") for tail in tails_of(node)}


def test_the_tokens_of_a_node_make_the_same_node_again() -> None:
    found, invalid = assemble(NODE.node, without_name(NODE))

    assert found is not None
    assert (set(found.serves), found.publish, invalid) == ({"svc/a", "svc/ü"}, NODE.publish, 0)


@given(st.sets(TAILS, max_size=6))
def test_no_token_crashes_the_reader_and_the_result_is_a_node_that_can_be_announced(
    tails: set[str],
) -> None:
    found, invalid = assemble(NODE.node, tails)

    assert 0 <= invalid <= len(tails)
    if found is not None:
        assert found.node == NODE.node
        assert all(isinstance(each, str) for each in (*found.serves, found.requests, found.publish or ""))
        assert assemble(NODE.node, without_name(found))[1] == 0


@given(st.sets(OTHER_TAILS, max_size=6))
def test_rubbish_beside_the_tokens_of_a_node_takes_nothing_from_it(tails: set[str]) -> None:
    found, _ = assemble(NODE.node, tails | without_name(NODE))

    assert found is not None
    assert (found.publish, found.requests) == (NODE.publish, NODE.requests)
    assert set(NODE.serves) <= set(found.serves)


def test_a_node_keeps_the_field_names_of_the_first_version_on_the_wire() -> None:
    found = msgspec.json.decode(msgspec.json.encode(NODE))

    assert found == {
        "node": "ab" * 8,
        "publish": "tcp://127.0.0.1:1",
        "questions": "tcp://127.0.0.1:2",
        "answers": ["svc/a", "svc/ü"],
        "curve_key": None,
    }
