"""The state of a bus for the console and the API: views, live statistics, activity, pages of the log."""
