"""The GraphQL endpoint."""
