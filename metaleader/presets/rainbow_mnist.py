"""The paper's Rainbow MNIST (section 6.1): 56 tasks of 900 datapoints, 20 per reveal."""

import functools

import metaleader as ml
from metaleader.methods import additions, matched


def experiment(schedule: str = "standard") -> ml.Experiment:
    """Digits of MNIST under 56 looks."""
    quick = schedule == "quick"
    tasks, reveals = (8, 5) if quick else (56, 45)
    meta_steps = {"standard": 10, "paper": 50, "quick": 2}[schedule]
    methods = {"ftml": {}, "ftml-last": {}, "ftl": {}, "toe": {"meta_lr": 1e-2}, "scratch": {"meta_lr": 1e-2}}
    return ml.Experiment(
        summary="the paper's Rainbow MNIST: 56 looks, 900 images each; needs mnist",
        stream=ml.streams.rainbow_mnist,
        network=functools.partial(ml.models.conv_net, classes=10),
        loss=functools.partial(ml.losses.cross_entropy, smoothing=0.1),
        methods=methods,
        extras=matched(methods) | {"ftml-one": {}, "ftml-recent": {}} | additions(tasks * reveals * meta_steps),
        tasks=tasks,
        reveal=20,
        reveals=reveals,
        meta_steps=meta_steps,
        gamma=0.9,
        panels=(100,) if quick else (100, 900),
    )
