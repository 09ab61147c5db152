"""Sinusoid regression with an MLP, 10 datapoints per reveal; needs no data."""

import functools

import metaleader as ml
from metaleader.methods import additions


def experiment(schedule: str = "standard") -> ml.Experiment:
    """Sinusoids of random amplitude and phase."""
    tasks, reveals, meta_steps = (20, 2, 40) if schedule == "quick" else (40, 3, 50)
    return ml.Experiment(
        summary="sinusoids of random amplitude and phase, an MLP; needs no data",
        stream=functools.partial(ml.streams.SinusoidStream, tasks=tasks, train=10 * reveals),
        network=functools.partial(ml.models.mlp, inputs=1, outputs=1),
        loss=ml.losses.squared_error,
        methods={
            "ftml": {"inner_lr": 0.01},
            "ftml-last": {"inner_lr": 0.01},
            "ftl": {"inner_lr": 0.01},
            "toe": {},
            "scratch": {"meta_lr": 1e-2},
        },
        extras=additions(tasks * reveals * meta_steps, inner_lr=0.01) | {"mixed": {}, "joint-offset": {}},
        tasks=tasks,
        reveal=10,
        reveals=reveals,
        meta_steps=meta_steps,
        gamma=0.1,
        error_name="squared error",
        # The tensors are so small that a second thread makes updates slower.
        threads=1,
    )
