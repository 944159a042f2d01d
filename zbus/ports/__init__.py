"""The contracts between the core and its plugins: a log, a transport (fabric) and a cache."""
