"""Bridges: processes that forward events between two transports."""
