"""Indices and slices are the same for every stream."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

import metaleader as ml
from metaleader.checks import check_stream
from metaleader.streams import (
    ArrayStream,
    BaseStream,
    Labelled,
    NWayStream,
    PoseStream,
    QuadraticStream,
    SinusoidStream,
    View,
    make_stream,
    rainbow_digits,
)
from metaleader.tasks import TaskStream


def n_way():
    labels = np.repeat(np.arange(7), 4)
    x = np.arange(28, dtype=np.float32)[:, None]
    return NWayStream(Labelled(x, labels, x + 100, labels), ways=3, per_class=4, names=list("abcdefg"))


STREAMS = {
    "arrays": lambda: ArrayStream({str(i): {"x": np.arange(4.0) + i, "y": np.zeros(4)} for i in range(5)}),
    "n-way": n_way,
    "quadratic": functools.partial(QuadraticStream, tasks=5, train=3, test=3),
    "rainbow": functools.partial(rainbow_digits, tasks=5, train=3, test=3),
    "sinusoid": functools.partial(SinusoidStream, tasks=5, train=3, test=3),
    "view": lambda: rainbow_digits(train=3, test=3)[7:2:-1],
}


@pytest.mark.parametrize("name", STREAMS)
def test_indices_and_slices_are_those_of_a_list(name):
    stream: Any = STREAMS[name]()
    assert isinstance(STREAMS[name](), TaskStream)
    names = [task.name for task in stream]
    assert len(names) == len(stream) == 5
    for t in range(-5, 5):
        assert stream[t].name == names[t]
        assert stream[np.int64(t)].name == names[t]
    for t in (-6, 5):
        with pytest.raises(IndexError, match=f"round {t} of a stream of 5 tasks"):
            stream[t]
    for chosen in (slice(3), slice(-2, None), slice(None, None, -1), slice(1, 100, 2), slice(2, 2)):
        part = stream[chosen]
        assert [task.name for task in part] == names[chosen]
        assert [task.name for task in part[1:]] == names[chosen][1:]
        assert part.attributes == {key: list(values)[chosen] for key, values in stream.attributes.items()}
    with pytest.raises(TypeError):
        stream[1.5]


def test_a_slice_plays_and_passes_the_checks():
    stream = n_way()
    check_stream(stream[1:4])
    learner = ml.FTML(torch.nn.Linear(1, 3), ml.losses.cross_entropy, support=3, query=3, meta_steps=1, inner_lr=1e-3)
    assert len(list(ml.play(learner, stream[:2], reveal=6))) == 4
    assert stream[:2].names == stream.names


def test_a_view_of_a_view_refers_to_the_stream():
    stream = SinusoidStream(tasks=9)
    view = stream[1:][::2][1:]
    assert view.stream is stream
    assert view.rounds == (3, 5, 7)
    tasks = [stream[0], stream[1]]
    assert View(tasks, [-1, 0, -1])[0] is tasks[1]
    with pytest.raises(IndexError, match="round 2 of a stream of 2 tasks"):
        View(tasks, [2])


def test_tasks_are_read_when_they_are_accessed():
    class Counting(BaseStream):
        read = 0

        def __len__(self):
            return 100

        def task(self, t):
            self.read += 1
            x = torch.full((1, 1), float(t))
            return ml.Task(str(t), ml.Batch(x, x), ml.Batch(x, x))

    stream = Counting()
    part = stream[50:60]
    assert stream.read == 0
    assert part[0].name == "50"
    assert stream.read == 1


def test_cameras_of_a_view(tmp_path):
    stream = PoseStream(tasks=3, images=3, train=2, cache=tmp_path)
    assert np.array_equal(stream[1:].camera(0).position, stream.camera(1).position)
    assert np.array_equal(stream.camera(-1).position, stream.camera(2).position)
    assert SinusoidStream()[:2].camera is None


@pytest.mark.parametrize("name", ["rainbow-digits", "rainbow-mnist", "cifar100", "pose", "sinusoid"])
def test_an_option_that_a_stream_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"unknown option of the stream {name} 'ordr'; did you mean 'order'\? There are "
    ):
        make_stream(name, ordr="random")
