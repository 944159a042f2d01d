"""Printing of events, tables and values, and parsing of option values."""
