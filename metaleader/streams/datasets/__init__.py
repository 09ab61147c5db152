"""Readers of the data sets on disk."""
