"""Estimators for scikit-learn: one model per group, predicted better than each group alone allows.

Both estimators are an average of a few `FTML` learners with `BayesianHead`: a network shared by all groups, whose last
linear layer is adapted to each group in closed form under a learned prior. With few datapoints a group is predicted
almost as the average group; with many, by its own data. What the prior cannot explain by groups it leaves alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from metaleader.engine.engine import Engine
from metaleader.learners import FTML, BayesianHead, update_together
from metaleader.losses import cross_entropy, squared_error
from metaleader.tasks import Batch

__all__ = ["MetaClassifier", "MetaRegressor"]

# Inputs beyond this many standard deviations are cut off: one rare indicator column would dominate a linear layer.
_LIMIT = 4.0
# Held-out groups are predicted from this many of their datapoints, and need two more to be measured on.
_SHOTS = 10
_MEASUREMENTS = 30
_WARM_UP, _LAST_LR = 0.3, 0.05
_HEAD = BayesianHead()


class _Net(nn.Module):
    """A multilayer perceptron beside the inputs themselves, under one linear layer."""

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int]) -> None:
        super().__init__()
        widths = [inputs, *hidden]
        layers = [layer for pair in zip(widths, hidden, strict=False) for layer in (nn.Linear(*pair), nn.SiLU())]
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(inputs + (hidden[-1] if hidden else 0), outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Predictions for rows of x."""
        return self.head(torch.cat([x, self.hidden(x)], -1) if len(self.hidden) else x)


class _MetaEstimator(BaseEstimator):
    # fmt: off
    def __init__(
        self, *, group: str | None = None, hidden: Sequence[int] = (64, 32), members: int = 4, updates: int = 800,
        learning_rate: float = 1e-2, validation: float = 0.15, random_state: int = 0,
    ) -> None:
        self.group, self.hidden, self.members, self.updates = group, hidden, members, updates
        self.learning_rate, self.validation, self.random_state = learning_rate, validation, random_state
    # fmt: on

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Learn the network and its prior from all groups.

        Args:
            X: (rows, features), numbers; a NumPy array, or a pandas or polars frame.
            y: (rows,), targets.
            groups: (rows,), the group of each row; None with the setting `group`, or for a single group.
        """
        X, names = self._groups_of(X, groups)
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=self._loss is squared_error)
        names = _checked(names, X)
        self._begin(X, y)
        self._train(self._tasks(X, y, names))
        return self

    def partial_fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Add data of any groups and update; the first call is `fit`, which fixes the scaling."""
        if not hasattr(self, "learners_"):
            return self.fit(X, y, groups)
        X, names = self._groups_of(X, groups)
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=self._loss is squared_error, reset=False)
        for name, batch in self._tasks(X, y, _checked(names, X)):
            for learner in self.learners_:
                learner.observe(*batch, task=name, update=False)
        update_together(self.learners_, max(1, self.updates // 80))
        return self

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        if "learners_" not in state:
            return state
        return state | {"learners_": [learner.state_dict() for learner in self.learners_]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "learners_" in state:
            self.learners_ = self._learners(*self._sizes)
            for learner, saved in zip(self.learners_, state["learners_"], strict=True):
                learner.load_state_dict(saved)

    _loss: Any
    _targets: Any
    _num_outputs: int
    n_features_in_: int

    def _begin(self, X: np.ndarray, y: np.ndarray) -> None:
        self.x_mean_, scale = X.mean(0), X.std(0)
        self.x_scale_ = np.where(scale > 1e-12 * np.abs(self.x_mean_) + 1e-300, scale, 1.0)

    def _groups_of(self, X: Any, groups: Any) -> tuple[Any, Any]:
        """The features and the groups, which may be a column of a frame."""
        if self.group is None:
            return X, groups
        if groups is not None:
            raise ValueError(f"groups come from the column {self.group!r} (setting group=); leave groups=None")
        if not hasattr(X, "columns"):
            raise ValueError(f"group={self.group!r} names a column, but X is {type(X).__name__}; pass a data frame")
        if self.group not in list(X.columns):
            raise ValueError(f"X has no column {self.group!r} (setting group=); its columns are {list(X.columns)}")
        rest = X.drop(columns=[self.group]) if hasattr(X, "iloc") else X.drop(self.group)
        return rest, X[self.group]

    def _inputs(self, X: np.ndarray) -> Tensor:
        standardised = np.clip((X - self.x_mean_) / self.x_scale_, -_LIMIT, _LIMIT)
        return torch.as_tensor(standardised, dtype=torch.float32)

    def _tasks(self, X: np.ndarray, y: np.ndarray, names: list[str]) -> Iterator[tuple[str, Batch]]:
        """The datapoints of each group, in the order of first appearance."""
        x, targets = self._inputs(X), self._targets(y)
        for name, rows in _rows_of(names).items():
            yield name, Batch(x[rows], targets[rows])

    def _learners(self, num_features: int, num_outputs: int, width: int, tasks: int) -> list[FTML]:
        self._sizes = (num_features, num_outputs, width, tasks)
        engine = Engine("eager")
        hidden = tuple(self.hidden)
        return [
            FTML(
                lambda: _Net(num_features, num_outputs, hidden),
                self._loss,
                adaptation=_HEAD,
                support=max(1, width // 2),
                query=max(1, width - width // 2),
                tasks_per_step=tasks,
                meta_lr=_schedule(self.updates, self.learning_rate),
                seed=int(self.random_state) * 1000 + r,
                engine=engine,
            )
            for r in range(self.members)
        ]

    def _train(self, tasks: Iterator[tuple[str, Batch]]) -> None:
        """Update all members side by side; each keeps the parameters that predict its held-out groups best."""
        batches = dict(tasks)
        sizes = np.array([len(batch.y) for batch in batches.values()])
        width = int(np.clip(sizes.max(), 2, 2 * _SHOTS))
        self.learners_ = self._learners(self.n_features_in_, self._num_outputs, width, min(32, 2 * len(batches)))
        eligible = [name for name, batch in batches.items() if len(batch.y) >= _SHOTS + 2]
        num_held = int(self.validation * len(eligible))
        held = [
            [eligible[i] for i in sorted(np.random.default_rng([r, num_held]).permutation(len(eligible))[:num_held])]
            for r in range(self.members)
        ]
        for learner, names in zip(self.learners_, held, strict=True):
            for name in [name for name in batches if name not in names]:
                learner.observe(*batches[name], task=name, update=False)
        best: list[tuple[float, Any]] = [(math.inf, learner.state) for learner in self.learners_]
        step = max(1, self.updates // _MEASUREMENTS)
        for first in range(0, self.updates, step):
            update_together(self.learners_, min(step, self.updates - first))
            for r, (learner, names) in enumerate(zip(self.learners_, held, strict=True)):
                loss = _held_out_loss(learner, [batches[name] for name in names]) if names else -first
                if loss < best[r][0]:
                    best[r] = (loss, learner.state)
        for learner, (_, state), names in zip(self.learners_, best, held, strict=True):
            learner.state = state._replace(step=self.updates)  # members are updated side by side later
            for name in names:
                learner.observe(*batches[name], task=name, update=False)

    @torch.no_grad()
    def _outputs(self, X: Any, groups: Any) -> tuple[list[Tensor], Tensor, list[str]]:
        """The outputs of each member, the inputs, and the group of each row."""
        check_is_fitted(self, "learners_")
        X, names = self._groups_of(X, groups)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        names = _checked(names, X)
        x, rows = self._inputs(X), _rows_of(names)
        outputs = []
        for learner in self.learners_:
            known = learner.tasks
            output = learner.network.predict(learner.layout.named(learner.state.flat), x)  # the prior
            many = learner.predict_many({name: x[index] for name, index in rows.items() if name in known})
            for name, prediction in many.items():
                output[rows[name]] = prediction
            outputs.append(output)
        return outputs, x, names


class MetaRegressor(RegressorMixin, _MetaEstimator):
    """Regression for groups with few rows each.

    Inputs and targets are standardised with the statistics of the data given to `fit`, which stay fixed; inputs are cut
    off at 4 standard deviations.

    Args:
        group: the column of a frame that names the group, for pipelines and scorers, which pass no `groups`.
        hidden: the widths of the network's hidden layers; () is a linear mixed-effects model.
        members: the number of learners that are averaged, each with other weights and held-out groups.
        updates: the number of meta-updates in `fit`.
        learning_rate: the largest outer step size.
        validation: the fraction of the groups with 12 or more rows that choose when to stop, in each member others.
        random_state: the seed.
    """

    _loss = staticmethod(squared_error)
    _num_outputs = 1

    def predict(self, X: Any, groups: Any = None, *, return_std: bool = False) -> Any:
        """Predictions for rows of X; rows of unknown groups are predicted by the prior.

        Args:
            X: (rows, features), as in `fit`.
            groups: (rows,), as in `fit`.
            return_std: also return the predictive standard deviation, noise included.
        """
        outputs, x, names = self._outputs(X, groups)
        stacked = torch.stack(outputs)[..., 0].double()
        mean = stacked.mean(0).numpy() * self.y_scale_ + self.y_mean_
        if not return_std:
            return mean
        total = self._variances(x, names) + stacked.var(0, unbiased=False)
        return mean, total.sqrt().numpy() * self.y_scale_

    @torch.no_grad()
    def _variances(self, x: Tensor, names: list[str]) -> Tensor:
        """The predictive variance of each row, averaged over the members."""
        total = torch.zeros(len(x), dtype=torch.float64)
        for learner in self.learners_:
            params, known = learner.layout.named(learner.state.flat), learner.tasks
            for name, index in _rows_of(names).items():
                data = learner.memory.named(name) if name in known else None
                total[index] += _HEAD.variance(learner.network, params, data, x[index])[:, 0].double()
        return total / len(self.learners_)

    def _begin(self, X: np.ndarray, y: np.ndarray) -> None:
        super()._begin(X, y)
        self.y_mean_, scale = float(y.mean()), float(y.std())
        self.y_scale_ = scale if scale > 0 else 1.0

    def _targets(self, y: np.ndarray) -> Tensor:
        return torch.as_tensor((y - self.y_mean_) / self.y_scale_, dtype=torch.float32)[:, None]


class MetaClassifier(ClassifierMixin, _MetaEstimator):
    """Classification for groups with few rows each, all with the classes seen in `fit`.

    The arguments are those of `MetaRegressor`.
    """

    _loss = staticmethod(cross_entropy)

    def partial_fit(self, X: Any, y: Any, groups: Any = None, classes: Any = None) -> Self:
        """Add data and update; in the first call, `classes` may list classes that come later."""
        if classes is not None and not hasattr(self, "learners_"):
            self._classes = np.unique(classes)
        return super().partial_fit(X, y, groups)

    def predict_proba(self, X: Any, groups: Any = None) -> np.ndarray:
        """Probabilities, (rows, classes), in the order of `classes_`; unknown groups are predicted by the prior."""
        outputs, _, _ = self._outputs(X, groups)
        return torch.stack([torch.softmax(output.double(), -1) for output in outputs]).mean(0).numpy()

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """The most probable class of each row."""
        best = self.predict_proba(X, groups).argmax(1)
        return self.classes_[best]

    def _begin(self, X: np.ndarray, y: np.ndarray) -> None:
        check_classification_targets(y)
        super()._begin(X, y)
        self.classes_ = np.union1d(np.unique(y), self.__dict__.pop("_classes", y[:0]))
        self._num_outputs = len(self.classes_)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_[0]!r}; a classifier needs two or more classes")

    def _targets(self, y: np.ndarray) -> Tensor:
        unknown = sorted(set(np.unique(y).tolist()) - set(self.classes_.tolist()))
        if unknown:
            raise ValueError(f"classes {unknown} were not in the data given to fit, which had {self.classes_.tolist()}")
        return torch.as_tensor(np.searchsorted(self.classes_, y))


def _schedule(updates: int, lr: float) -> list[tuple[int, float]]:
    """Step sizes that rise and then fall, in at most 50 steps."""
    pairs = {}
    for i in range(50):
        at = i / 50
        rise = at / _WARM_UP if at < _WARM_UP else (1 + math.cos(math.pi * (at - _WARM_UP) / (1 - _WARM_UP))) / 2
        pairs[int(updates * at)] = lr * max(rise, _LAST_LR)
    return sorted(pairs.items())


def _checked(groups: Any, X: np.ndarray) -> list[str]:
    """The name of each row's group."""
    if groups is None:
        return ["all"] * len(X)
    values = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    if len(values) != len(X):
        raise ValueError(f"groups has {len(values)} values for {len(X)} rows of X")
    if any(value is None or value != value for value in values):
        raise ValueError("groups has missing values; drop these rows, or give them a group")
    return [repr(value) for value in values]  # 1 and "1" are two groups


def _rows_of(names: list[str]) -> dict[str, Tensor]:
    """The rows of each group, in the order of first appearance."""
    rows: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        rows.setdefault(name, []).append(i)
    return {name: torch.tensor(index) for name, index in rows.items()}


@torch.no_grad()
def _held_out_loss(learner: FTML, batches: Sequence[Batch]) -> float:
    """The mean loss of groups that the learner has not seen, each predicted from its first datapoints.

    For regression it is the negative log density, up to constants, so that variances are selected too.
    """
    params, longest = learner.layout.named(learner.state.flat), max(len(batch.y) for batch in batches)
    shots = tree_map(lambda *leaves: torch.stack([leaf[:_SHOTS] for leaf in leaves]), *batches)
    rest = [torch.arange(_SHOTS, longest) % len(batch.y) for batch in batches]
    is_row = torch.stack([torch.arange(_SHOTS, longest) < len(batch.y) for batch in batches])
    x = torch.stack([batch.x[index] for batch, index in zip(batches, rest, strict=True)])
    y = torch.stack([batch.y[index] for batch, index in zip(batches, rest, strict=True)])

    def losses(data: Batch, x: Tensor, y: Tensor) -> Tensor:
        prediction = learner.network.predict(params | _HEAD(learner.network, params, data), x)
        if learner.loss is not squared_error:
            return learner.loss(prediction, y)
        variance = _HEAD.variance(learner.network, params, data, x)
        return (variance.log() + (prediction - y).square() / variance)[:, 0]

    return float(torch.func.vmap(losses)(Batch(*shots), x, y)[is_row].mean())
