"""Learning without task boundaries: Bayesian changepoints over a closed-form head, as MOCA does.

    python examples/changepoints.py [sinusoid|digits] [seeds]

Datapoints arrive one by one, and nothing says when the task changes. The learner keeps a belief over the number of
datapoints since the last change. Each number is a hypothesis: the Bayesian head is adapted to that many of the newest
datapoints. A prediction is the mean over hypotheses. A label multiplies the belief by the density that each hypothesis
gave it. Segments that end by this belief become tasks, on which the network is trained.

True boundaries are the ceiling of this method, and a network without tasks (TOE) is its floor.
"""

import functools
import sys

import numpy as np
import torch

import metaleader as ml
from metaleader.losses import takes_labels

HAZARD = 0.05  # the probability of a change before each datapoint
SMALLEST = 1e-4  # hypotheses with less belief are dropped
CERTAIN = 5  # a segment ends when the next one has this many datapoints


class Changepoints:
    """Predicts datapoints of a stream without boundaries; with `boundaries=True`, `begin` says where tasks begin."""

    def __init__(self, learner, updates=10, boundaries=False):
        self.learner, self.updates, self.boundaries = learner, updates, boundaries
        self.x, self.y = None, None  # the datapoints of the present segment, and those after its end
        self.belief = {0: 1.0}  # by the number of datapoints since the last change
        self.segments = []

    def begin(self):
        """A task begins; only for the ceiling."""
        if self.boundaries and self.x is not None:
            self._end_segment(len(self.x))
            self.belief = {0: 1.0}

    def predict(self, x):
        """The mean over hypotheses at x, (1, ...): an expectation, or for classes probabilities."""
        return sum(weight * mean for weight, mean, _ in self._hypotheses(x).values())

    def observe(self, x, y):
        """One labelled datapoint arrives."""
        after = {}
        for number, (weight, mean, variance) in self._hypotheses(x).items():
            after[number + 1] = weight * float(_log_density(mean, variance, y).exp())
        total = sum(after.values())
        # If no hypothesis expects the label, a change is the best explanation.
        after = {number: w / total for number, w in after.items() if w > SMALLEST * total} if total > 0 else {1: 1.0}
        self.belief = {number: weight / sum(after.values()) for number, weight in after.items()}
        self.x = x if self.x is None else torch.cat([self.x, x])
        self.y = y if self.y is None else torch.cat([self.y, y])
        likely = max(self.belief, key=self.belief.__getitem__)
        if CERTAIN <= likely < len(self.x):
            self._end_segment(len(self.x) - likely)

    def _hypotheses(self, x):
        """By number of datapoints: belief, prediction and variance, if a change may come before x."""
        change = 0.0 if self.boundaries else HAZARD
        belief = {number: weight * (1 - change) for number, weight in self.belief.items()}
        belief[0] = belief.get(0, 0.0) + change
        return {number: (weight, *self._predicted(number, x)) for number, weight in belief.items() if weight > 0}

    @torch.no_grad()
    def _predicted(self, number, x):
        """The prediction at x after the newest datapoints, and its variance, which classes do not have."""
        network, head = self.learner.network, self.learner.options.adaptation
        params = self.learner.layout.named(self.learner.state.flat)  # of the network, the prior and the noise
        data = None if number == 0 else ml.Batch(self.x[-number:], self.y[-number:])
        adapted = params if data is None else {**params, **head(network, params, data)}
        output = network.predict(adapted, x)
        if takes_labels(self.learner.loss):
            return output.softmax(1), None
        return output, head.variance(network, params, data, x)

    def _end_segment(self, number):
        """Train on the first datapoints as one task."""
        name = f"segment {len(self.segments)}"
        self.segments.append(number)
        self.learner.observe(self.x[:number], self.y[:number], task=name, update=False)
        for _ in range(self.updates):
            self.learner.update()
        self.x, self.y = (values[number:] if len(values) > number else None for values in (self.x, self.y))


class Joint:
    """The floor: one network for all datapoints, without tasks and adaptation."""

    def __init__(self, learner, updates=10, every=20):
        self.learner, self.updates, self.every, self.pending = learner, updates, every, []

    def begin(self):
        """Nothing happens when a task begins."""

    def predict(self, x):
        output = self.learner.network.predict(self.learner.params, x)
        return output.softmax(1) if takes_labels(self.learner.loss) else output

    def observe(self, x, y):
        self.pending.append((x, y))
        if len(self.pending) == self.every:
            x, y = (torch.cat(values) for values in zip(*self.pending, strict=True))
            self.learner.observe(x, y, task="all", update=False)
            for _ in range(self.updates):
                self.learner.update()
            self.pending = []


def _log_density(mean, variance, y):
    if variance is None:
        return mean[0, y[0]].clamp(min=1e-9).log()
    return torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum()


@torch.no_grad()
def errors(learner, stream, lengths):
    """Predict each datapoint before its label is observed; squared errors, or 1 where the class is wrong."""
    found = []
    for task, length in zip(stream, lengths, strict=True):
        learner.begin()
        for i in range(length):
            x, y = (values[i : i + 1] for values in task.train)
            prediction = learner.predict(x)
            is_class = takes_labels(learner.learner.loss)
            wrong = (prediction.argmax(1) != y).float() if is_class else (prediction - y).square()
            found.append(float(wrong.mean()))
            learner.observe(x, y)
    return np.array(found)


def sinusoids(seed, tasks=60):
    """Drifting sinusoids with noise, each of 10 to 30 datapoints."""
    stream = ml.streams.SinusoidStream(tasks=tasks, train=30, test=1, drift=0.05, noise=0.1, seed=seed)
    return stream, lambda: ml.models.mlp(1, 1, [40, 40]), ml.losses.squared_error


def digits(seed, tasks=30):
    """Digits under changing looks, without batch norm, which would need more than one row."""
    looks = ml.streams.rainbow_digits(seed=seed)
    stream = [looks[t] for t in range(tasks)]
    first = looks[0].train.x[0]
    flat = [
        ml.Task(t.name, *(ml.Batch(b.x.flatten(1).float() / 255 - 0.5, b.y) for b in (t.train, t.test))) for t in stream
    ]
    return flat, lambda: ml.models.mlp(first.numel(), 10, [64, 64]), ml.losses.cross_entropy


def main(name="sinusoid", seeds=3, tasks=None, updates=10):
    """The mean error over the second half of the stream, for each method and seed."""
    make = {"sinusoid": sinusoids, "digits": digits}[name]
    results = {}
    for seed in range(seeds):
        stream, network, loss = make(seed, **({} if tasks is None else {"tasks": tasks}))
        most = min(30 if name == "sinusoid" else 60, len(stream[0].train.y))
        lengths = np.random.default_rng(seed).integers(most // 3, most + 1, size=len(stream))
        settings = {"meta_lr": 3e-3, "tasks_per_step": 8, "query": 10, "meta_steps": 1, "seed": seed}
        bayes = functools.partial(ml.FTML, network, loss, adaptation=ml.BayesianHead(), support=10, **settings)
        learners = {
            "true boundaries": Changepoints(bayes(), updates, boundaries=True),
            "changepoints": Changepoints(bayes(), updates),
            "joint training": Joint(ml.TOE(network, loss, **settings), updates),
        }
        for method, learner in learners.items():
            found = errors(learner, stream, lengths)
            results.setdefault(method, []).append(float(found[len(found) // 2 :].mean()))
            counts = f", {len(learner.segments) + 1} segments" if isinstance(learner, Changepoints) else ""
            print(f"seed {seed}, {method}: {results[method][-1]:.4f}{counts}, {len(stream)} tasks", flush=True)
    for method, values in results.items():
        spread = f" ± {np.std(values, ddof=1) / seeds**0.5:.4f}" if seeds > 1 else ""
        print(f"{method}: {np.mean(values):.4f}{spread}")
    return results


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
