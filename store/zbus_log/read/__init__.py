"""Reading a log: pages from the file, pages that join the cold tier, and full verification."""
