"""The pose stream: rendered objects, cached on disk."""
