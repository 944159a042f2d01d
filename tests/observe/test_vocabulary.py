"""Every log record, code and counter is in the catalog, and a reason never comes without a code."""

from __future__ import annotations

import ast
import logging
import re

import pytest
import vocabulary
from vocabulary import Coded

from zbus.observe import records
from zbus.observe.catalog import CODES, COUNTERS, RECORDS, TRANSPORT_COUNTERS
from zbus.observe.records import record, record_reason

CODE = re.compile(r"^[a-z][a-z0-9_]*$")
# Counters that are attributes, and those whose name is made from a code.
COMPUTED = {"published", "delivered", "publish_blocked", "subscriptions", "subscriptions_catching_up", "nodes"} | {
    "dropped_queue_full",
    "dropped_backlog_full",
}


def literals() -> set[str]:
    """Every string in the source, without the catalog."""
    trees = vocabulary.trees(*vocabulary.SOURCES)
    return {
        node.value
        for file, tree in trees.items()
        if vocabulary.ROOT / file != vocabulary.CATALOG
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_a_record_with_a_reason_is_written_only_by_the_function_that_requires_a_code() -> None:
    assert vocabulary.reasons_without_code() == []


def test_every_code_that_the_source_names_is_in_the_catalog_and_well_formed() -> None:
    used = vocabulary.used().codes
    assert {code: place for code, place in used.items() if code not in CODES} == {}
    assert [code for code in CODES if not CODE.fullmatch(code)] == []


def test_the_catalog_lists_no_code_that_the_source_does_not_name() -> None:
    assert sorted(CODES.keys() - literals()) == []


def test_every_record_is_in_the_catalog_and_the_other_way_round() -> None:
    used = vocabulary.used().records
    assert {name: place for name, place in used.items() if name not in RECORDS} == {}
    assert sorted(RECORDS.keys() - used.keys()) == []


def test_every_record_constant_is_equal_to_its_name() -> None:
    names = [name for name in vars(records) if vocabulary.RECORD.fullmatch(name)]
    assert [name for name in names if getattr(records, name) != name] == []


def test_every_counter_is_in_the_catalog_and_the_other_way_round() -> None:
    used = vocabulary.used().counters
    listed = COUNTERS.keys() | TRANSPORT_COUNTERS.keys() | CODES.keys()
    assert {name: place for name, place in used.items() if name not in listed} == {}
    assert sorted(TRANSPORT_COUNTERS.keys() - used.keys()) == []
    assert sorted(COUNTERS.keys() - used.keys() - COMPUTED - CODES.keys()) == []


def test_a_test_asserts_every_record_code_and_counter() -> None:
    """`vocabulary.asserted` says what counts as an assertion, and what it cannot see."""
    names = RECORDS.keys() | CODES.keys() | COUNTERS.keys() | TRANSPORT_COUNTERS.keys()
    assert sorted(names - vocabulary.asserted()) == []


def test_a_record_with_a_reason_cannot_be_written_without_a_code() -> None:
    with pytest.raises(TypeError, match="code"):
        record_reason("EVENT_DROPPED", logging.WARNING, reason="the queue is full")  # type: ignore[call-arg]


@pytest.mark.parametrize("code", [None, "Queue full", "queue-full", ""])
def test_the_check_that_every_test_shares_finds_a_reason_without_a_good_code(code: str | None) -> None:
    coded = Coded()
    logger = logging.getLogger("zbus")
    logger.addFilter(coded)
    shared = [each for each in logger.filters if isinstance(each, Coded) and each is not coded]
    for each in shared:
        logger.removeFilter(each)
    try:
        record("EVENT_DROPPED", logging.WARNING, reason="full", **({} if code is None else {"code": code}))
        record("EVENT_DROPPED", logging.WARNING, reason="full", code="queue_full")
    finally:
        logger.removeFilter(coded)
        for each in shared:
            logger.addFilter(each)
    assert [(each["record"], each.get("code")) for each in coded.without] == [("EVENT_DROPPED", code)]
