"""Schemas: the registry, JSON Schema validation, compatibility rules and AsyncAPI documents."""
