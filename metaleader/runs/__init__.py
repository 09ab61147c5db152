"""Run folders: writing, resuming and joining them."""
