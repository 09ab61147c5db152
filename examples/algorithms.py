r"""Algorithms of online meta-learning compared on sinusoids, with equal tuning effort and seeds that were not tuned on.

    metaleader tune examples/algorithms.py --search all.meta_lr=log:3e-4..0.01 --search proximal.strength=log:0.01..1 \
        --search inner_lr=log:0.003..0.3 --methods ftml,variable,ftml-rates,streaming,proximal,reptile --out runs/tune
    metaleader run runs/tune/tuned.py --seeds 10 --out runs/algorithms

`bayes` and `toe` have no inner step size: tune them with the first range alone.
"""

import functools

from proximal import Proximal
from reptile import Reptile

import metaleader as ml

inner = {"inner_lr": 0.02, "inner_steps": 5}
shared = {"meta_lr": 1e-3, "tasks_per_step": 8}

methods = {
    "ftml": {**shared, **inner},
    "variable": ml.Method(ml.FTML, label="variable shot", support=(1, 2, 5, 10), **shared, **inner),
    "ftml-rates": {**shared, **inner},
    "streaming": ml.Method(ml.FTML, label="streaming", max_tasks=1, **shared, **inner),
    "proximal": ml.Method(Proximal, strength=0.1, **shared, **inner),
    "reptile": ml.Method(Reptile, **shared, **inner),
    "bayes": ml.Method(ml.FTML, label="Bayesian head", adaptation=ml.BayesianHead(), **shared),
    "toe": dict(shared),
}

experiment = ml.Experiment(
    summary="algorithms on sinusoids; needs no data",
    stream=functools.partial(ml.streams.SinusoidStream, tasks=30, train=20),
    network=functools.partial(ml.models.mlp, inputs=1, outputs=1),
    loss=ml.losses.squared_error,
    methods=methods,
    reveal=10,
    meta_steps=20,
    gamma=0.1,
    steps=(5, 1, 10),
    error_name="squared error",
    threads=1,
)
