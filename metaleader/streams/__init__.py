"""Streams of tasks."""

from metaleader.streams.sinusoid import SinusoidStream

__all__ = ["SinusoidStream"]
