"""Experiments: the value that a file defines, its settings by path, their description, and its claims."""
