"""Copies of a log: backups, full and incremental, restoring one, and forks for rehearsals."""
