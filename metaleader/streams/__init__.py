"""Streams of tasks."""

from metaleader.streams.quadratic import QuadraticStream
from metaleader.streams.sinusoid import SinusoidStream

__all__ = ["QuadraticStream", "SinusoidStream"]
