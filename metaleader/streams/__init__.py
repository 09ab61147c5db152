"""Streams of tasks."""

from metaleader.streams.arrays import ArrayStream, from_dataset
from metaleader.streams.base import BaseStream, View
from metaleader.streams.catalogue import STREAMS, make_stream
from metaleader.streams.datasets.cifar import cifar100
from metaleader.streams.datasets.mnist import read_idx
from metaleader.streams.folders import from_folder
from metaleader.streams.frames import FrameStream, from_frame
from metaleader.streams.nway import Labelled, NWayStream
from metaleader.streams.order import reorder
from metaleader.streams.pose.stream import PoseStream
from metaleader.streams.quadratic import QuadraticStream
from metaleader.streams.rainbow import RainbowStream, rainbow, rainbow_digits, rainbow_mnist
from metaleader.streams.sinusoid import SinusoidStream

__all__ = [
    "STREAMS",
    "ArrayStream",
    "BaseStream",
    "FrameStream",
    "Labelled",
    "NWayStream",
    "PoseStream",
    "QuadraticStream",
    "RainbowStream",
    "SinusoidStream",
    "View",
    "cifar100",
    "from_dataset",
    "from_folder",
    "from_frame",
    "make_stream",
    "rainbow",
    "rainbow_digits",
    "rainbow_mnist",
    "read_idx",
    "reorder",
]
