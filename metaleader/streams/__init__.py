"""Streams of tasks."""

from metaleader.streams.pose import PoseStream
from metaleader.streams.sinusoid import SinusoidStream

__all__ = ["PoseStream", "SinusoidStream"]
