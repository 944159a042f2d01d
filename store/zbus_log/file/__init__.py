"""The files of a log: the database with its tables, the head record, and the manifest of the cold tier."""
