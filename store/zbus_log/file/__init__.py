"""The files of a log: the database and its tables, the head record, the manifest of the cold tier."""
