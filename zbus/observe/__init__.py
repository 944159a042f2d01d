"""Observability: log records, counters, histograms, statistics and tracing."""
