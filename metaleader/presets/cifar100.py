"""The paper's 5-way CIFAR-100 (section 6.2): the newest class and four earlier ones, 50 datapoints per reveal."""

import functools

from torch import nn

import metaleader as ml


def experiment(schedule: str = "standard") -> ml.Experiment:
    """One new class per task."""
    quick = schedule == "quick"
    meta = {"query": 25, "optimizer": "sgd", "meta_lr": [(0, 0.01), (5000, 0.001)], "support": 25}
    return ml.Experiment(
        summary="the paper's 5-way CIFAR-100: 96 tasks, one new class each; needs cifar100",
        stream=ml.streams.cifar100,
        network=functools.partial(ml.models.conv_net, classes=5, image_size=32),
        loss=functools.partial(ml.losses.cross_entropy, smoothing=0.1),
        # With one 5-way head over shuffled labels, TOE and FTL stay at chance, so the paper has neither here. TOE with
        # one output per class is an addition.
        methods={
            "ftml": meta,
            "ftml-last": meta,
            "toe": {"model": net_over_classes, "query": 25},
            "scratch": {"query": 25},
        },
        extras={"ftml-one": meta, "ftml-recent": meta, "ftml-adam": {"support": 25, "query": 25}},
        tasks=6 if quick else 96,
        reveal=50,
        reveals=5 if quick else 40,
        meta_steps={"standard": 10, "paper": 25, "quick": 2}[schedule],
        panels=(50, 250) if quick else (50, 250, 2000),
    )


def net_over_classes() -> nn.Module:
    """A network with one output per class of CIFAR-100; the logits of a task are those of its five classes."""
    net = ml.models.conv_net(100, image_size=32)
    net.add_module("logits", ml.models.TaskLogits(100))
    return net
