"""The methods of algorithms.py on Rainbow digits: 10 classes under changing looks; the commands are the same."""

import functools

from algorithms import methods

import metaleader as ml

experiment = ml.Experiment(
    summary="algorithms on Rainbow digits; needs no data",
    stream=ml.streams.rainbow_digits,
    network=functools.partial(ml.models.conv_net, classes=10, image_size=16, filters=16, layers=3),
    loss=functools.partial(ml.losses.cross_entropy, smoothing=0.1),
    methods=methods,
    tasks=16,
    reveal=20,
    reveals=3,
    meta_steps=8,
    gamma=0.7,
    steps=(5, 1),
    threads=1,
)
