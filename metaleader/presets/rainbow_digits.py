"""Rainbow over scikit-learn's digits with a small conv net: the default preset; needs no data, suits two cores."""

import functools

import metaleader as ml
from metaleader.methods import additions, matched


def experiment(schedule: str = "standard") -> ml.Experiment:
    """Digits under 56 looks, 20 per reveal."""
    quick = schedule == "quick"
    tasks, meta_steps = 16 if quick else 56, {"standard": 10, "paper": 50, "quick": 8}[schedule]
    options = {"tasks_per_step": 8, "meta_lr": 3e-3}
    methods = {"ftml": options, "ftml-last": options, "ftl": options, "toe": options, "scratch": options}
    return ml.Experiment(
        summary="digits under 56 looks at 16x16, a small conv net; needs no data",
        stream=ml.streams.rainbow_digits,
        network=functools.partial(ml.models.conv_net, classes=10, image_size=16, filters=16, layers=3),
        loss=functools.partial(ml.losses.cross_entropy, smoothing=0.1),
        methods=methods,
        extras=matched(methods)
        | {"ftml-one": options, "ftml-recent": options}
        | additions(tasks * 3 * meta_steps, **options),
        tasks=tasks,
        reveal=20,
        reveals=3,
        meta_steps=meta_steps,
        # After 16 tasks no method is far above 0.8.
        gamma=0.7 if quick else 0.8,
        panels=(20, 60),
        steps=(5, 0, 1, 10) if quick else (5, 0, 1, 10, 20),
        # A second thread gains little, and on a busy machine it makes updates many times slower.
        threads=1,
    )
