"""Scenarios: their files, running them with many seeds, shrinking failures, and checking routes."""
