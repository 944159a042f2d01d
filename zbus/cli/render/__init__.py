"""How commands print events, tables and values."""
