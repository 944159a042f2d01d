"""Limits for GraphQL documents, so that a short document cannot cause much work.

strawberry's limits for depth, aliases and tokens expand a document fragment by fragment. A few lines of fragments that
each name the next one twice keep them busy forever. So this module first computes the expanded size, visiting each
fragment once, and rejects a document that is too large before any other rule runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from graphql import (
    DocumentNode,
    FieldNode,
    FragmentDefinitionNode,
    FragmentSpreadNode,
    GraphQLError,
    OperationDefinitionNode,
    SelectionSetNode,
)
from strawberry.extensions import MaxAliasesLimiter, MaxTokensLimiter, QueryDepthLimiter, SchemaExtension

DEPTH_MAX = 8
INTROSPECTION_DEPTH_MAX = 20  # The usual query of tools has 15 levels; graphql-core limits how its lists nest.
ALIASES_MAX = 15
TOKENS_MAX = 1000
FIELDS_MAX = 500

Size = tuple[int, int]  # number of fields, and depth


class SpreadLimiter(SchemaExtension):
    """Rejects a document that expands to too many fields or levels, including introspection."""

    def on_validate(self) -> Iterator[None]:
        """Check the size before the rules of strawberry and graphql-core run."""
        document = self.execution_context.graphql_document
        if document is not None and self.execution_context.pre_execution_errors is None:
            error = _too_much(document)
            if error is not None:
                self.execution_context.pre_execution_errors = [error]
        yield


def limits() -> list[type[SchemaExtension] | Callable[[], SchemaExtension] | Any]:
    """Return the extensions of a schema, in the order in which they run."""
    return [
        lambda: MaxTokensLimiter(max_token_count=TOKENS_MAX),
        SpreadLimiter,
        lambda: QueryDepthLimiter(max_depth=DEPTH_MAX),
        lambda: MaxAliasesLimiter(max_alias_count=ALIASES_MAX),
    ]


def _too_much(document: DocumentNode) -> GraphQLError | None:
    try:
        sizes = _Sizes(document)
        fields, depth = sizes.of_operations()
    except _Cycle as cycle:
        return GraphQLError(f"fragment {cycle} contains itself")
    if fields > FIELDS_MAX:
        return GraphQLError(f"the document expands to more than {FIELDS_MAX} fields")
    if depth > INTROSPECTION_DEPTH_MAX:
        return GraphQLError(f"the document is deeper than {INTROSPECTION_DEPTH_MAX} levels")
    return None


class _Cycle(Exception):
    """Raised for a fragment that contains itself, directly or indirectly."""


class _Sizes:
    """The expanded size of each fragment, computed once."""

    def __init__(self, document: DocumentNode) -> None:
        self._document = document
        self._fragments = {
            each.name.value: each for each in document.definitions if isinstance(each, FragmentDefinitionNode)
        }
        self._known: dict[str, Size | None] = {}  # None while it is being computed

    def of_operations(self) -> Size:
        found = [
            self._of_set(each.selection_set)
            for each in self._document.definitions
            if isinstance(each, OperationDefinitionNode)
        ]
        return sum(fields for fields, _ in found), max((depth for _, depth in found), default=0)

    def _of_set(self, selected: SelectionSetNode | None) -> Size:
        fields = depth = 0
        for each in selected.selections if selected is not None else ():
            if isinstance(each, FragmentSpreadNode):
                found = self._of_fragment(each.name.value)
            else:
                found = self._of_set(getattr(each, "selection_set", None))
            own = isinstance(each, FieldNode)
            fields += found[0] + own
            depth = max(depth, found[1] + own)
        return fields, depth

    def _of_fragment(self, name: str) -> Size:
        if name in self._known:
            known = self._known[name]
            if known is None:
                raise _Cycle(name)
            return known
        self._known[name] = None
        fragment = self._fragments.get(name)  # Other rules report a missing fragment.
        found = self._of_set(fragment.selection_set) if fragment is not None else (0, 0)
        self._known[name] = found
        return found
