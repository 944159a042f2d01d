"""The folder of write requests that an older zbus left beside a log."""

from __future__ import annotations

from pathlib import Path

WAKE = "wake"


class OldFolder:
    """The folder `app.db-errands/`, in which clients of an older zbus left their write requests.

    No owner executes them any more. Nothing in it was acknowledged, but the events in its files may exist nowhere else,
    so only an empty folder is removed.
    """

    def __init__(self, log_path: str) -> None:
        self.path = Path(f"{log_path}-errands")

    def files(self) -> int:
        """Return the number of files in the folder, apart from its FIFO; 0 if the folder does not exist."""
        try:
            return sum(1 for each in self.path.iterdir() if each.name != WAKE)
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def remove_if_empty(self) -> None:
        """Remove the folder and its FIFO, unless other files are left in it. Raises `OSError` if that fails."""
        if self.path.is_dir() and not self.files():
            (self.path / WAKE).unlink(missing_ok=True)
            self.path.rmdir()

    def describe(self) -> str | None:
        """Return what is left in the folder and what to do about it, or None if it holds no files."""
        if not (files := self.files()):
            return None
        return (
            f"{self.path} holds {files} files with write requests of an older zbus, which were never executed: "
            "put the events again if they are needed, then delete the folder"
        )
