"""Estimators for scikit-learn: one model per group, predicted better than each group alone allows.

Both estimators are a weighted average of a few `FTML` learners with `BayesianHead`: a network, or the inputs alone,
shared by all groups, whose last linear layer, or its bias, is adapted to each group in closed form under a learned
prior. With few datapoints a group is predicted almost as the average group; with many, by its own data. For classes,
the average includes a random forest and boosted trees.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from metaleader.losses import cross_entropy, squared_error
from metaleader.sklearn.ensemble import Ensemble
from metaleader.tasks import Batch

__all__ = ["MetaClassifier", "MetaRegressor"]

# Inputs beyond this many standard deviations are cut off: one rare indicator column would dominate a linear layer.
_LIMIT = 4.0
# Datapoints per task of an update, at most
_WIDTH = 20


class _MetaEstimator(BaseEstimator):
    # fmt: off
    def __init__(
        self, *, group: str | None = None, hidden: Sequence[int] = (64, 32), members: int = 4, updates: int = 800,
        learning_rate: float = 1e-2, validation: float = 0.15, random_state: Any = 0,
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
        self._check_settings()
        self._begin(X, y)
        batches = dict(self._tasks(X, y, names))
        longest = max(len(batch.y) for batch in batches.values())
        if longest == 1 < len(batches):
            raise ValueError("every group has one row: groups need two rows or more to learn from; leave groups=None")
        seed = self.random_state
        self._seed = int(seed) if isinstance(seed, Integral) else int(check_random_state(seed).randint(2**31 - 1))
        self.ensemble_ = self._make(self._num_outputs, int(np.clip(longest, 2, _WIDTH)), min(32, 2 * len(batches)))
        self.ensemble_.train(batches, self.validation)
        return self

    def _check_settings(self) -> None:
        for name, least in (("members", 1), ("updates", 0)):
            if not isinstance(getattr(self, name), Integral) or getattr(self, name) < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {getattr(self, name)!r}")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation must be a fraction from 0 to below 1, got {self.validation!r}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate!r}")
        if isinstance(self.hidden, str) or not isinstance(self.hidden, Sequence) or min(self.hidden, default=1) < 1:
            raise ValueError(f"hidden must be widths of layers, such as (64, 32) or (), got {self.hidden!r}")
        if isinstance(self.random_state, Integral) and self.random_state < 0:
            raise ValueError(f"random_state must be at least 0, got {self.random_state}")

    def partial_fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Add data of any groups and update; the first call is `fit`, which fixes the scaling."""
        if not hasattr(self, "ensemble_"):
            return self.fit(X, y, groups)
        X, names = self._groups_of(X, groups)
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=self._loss is squared_error, reset=False)
        self.ensemble_.add(dict(self._tasks(X, y, _checked(names, X))), updates=max(1, self.updates // 80))
        return self

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return state | {"ensemble_": self.ensemble_.state()} if "ensemble_" in state else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "ensemble_" in state:
            self.ensemble_ = self._make(*self._sizes)
            self.ensemble_.load(state["ensemble_"])

    _loss: Any
    _targets: Any
    _num_outputs: int
    n_features_in_: int

    def _begin(self, X: np.ndarray, y: np.ndarray) -> None:
        self.x_mean_, scale = X.mean(0), X.std(0)
        # Constant columns become 0 in every call: nothing is learned of them.
        self.x_scale_ = np.where(scale > 1e-12 * np.abs(self.x_mean_) + 1e-300, scale, np.inf)

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

    def _make(self, num_outputs: int, width: int, tasks: int) -> Ensemble:
        self._sizes = (num_outputs, width, tasks)
        lr, hidden = self.learning_rate, tuple(self.hidden)
        numbers = (self.n_features_in_, num_outputs, hidden, self.members, self.updates, lr, self._seed, width, tasks)
        return Ensemble(self._loss, *numbers)

    def _outputs(self, X: Any, groups: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The outputs of each member, the inputs, and the rows of each group."""
        check_is_fitted(self, "ensemble_")
        X, names = self._groups_of(X, groups)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        x, rows = self._inputs(X), _rows_of(_checked(names, X))
        self._warn_of_other_names(list(rows))
        return self.ensemble_.outputs(x, rows), x, rows

    def _warn_of_other_names(self, names: list[str]) -> None:
        """Warn if no group is known, and some would be as text, or as numbers."""
        known = self.ensemble_.tasks
        others = [name[1:-1] if name[0] == "'" else f"'{name}'" for name in names]
        if known.isdisjoint(names) and not known.isdisjoint(others):
            warnings.warn(
                f"no group of this call is known: one is {names[0]} here, and fit had groups such as {min(known)};"
                " all rows are predicted by the prior",
                stacklevel=4,
            )


class MetaRegressor(RegressorMixin, _MetaEstimator):
    """Regression for groups with few rows each.

    Inputs and targets are standardised with the statistics of the data given to `fit`, which stay fixed; inputs are cut
    off at 4 standard deviations.

    Args:
        group: the column of a frame that names the group, for pipelines and scorers, which pass no `groups`.
        hidden: the widths of the hidden layers of the networks; with () all members are linear mixed-effects models.
        members: the number of learners that are averaged. In turn, they are a network with a last layer per group, a
            network with an offset per group, a linear mixed-effects model, and another network with an offset.
        updates: the number of meta-updates in `fit`.
        learning_rate: the largest outer step size.
        validation: the fraction of the groups with 12 or more rows (for classes 7, if there are too few) that are held
            out during training. They choose when each member stops, how much it adapts, and its weight in the average.
        random_state: the seed, a `RandomState`, or None for a random one.
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
        outputs, x, rows = self._outputs(X, groups)
        weights, values = self.ensemble_.weights[:, None], outputs[..., 0]
        mean = (weights * values).sum(0)
        found = mean.numpy() * self.y_scale_ + self.y_mean_
        if not return_std:
            return found
        variance = (weights * (self.ensemble_.variances(x, rows) + (values - mean).square())).sum(0)
        return found, variance.sqrt().numpy() * self.y_scale_

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """The coefficient of determination; without groups, that of the prior."""
        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))

    def _begin(self, X: np.ndarray, y: np.ndarray) -> None:
        super()._begin(X, y)
        self.y_mean_, scale = float(y.mean()), float(y.std())
        self.y_scale_ = scale if scale > 0 else 1.0

    def _targets(self, y: np.ndarray) -> Tensor:
        return torch.as_tensor((y - self.y_mean_) / self.y_scale_, dtype=torch.float32)[:, None]


class MetaClassifier(ClassifierMixin, _MetaEstimator):
    """Classification for groups with few rows each, all with the classes seen in `fit`.

    The arguments are those of `MetaRegressor`, but members are in turn a network with a last layer per group, a linear
    model per group, and a network with an offset per group. Of four or more members, the last two are a random forest
    and boosted trees over the inputs, the class shares of the group, and numbers of the group. They are used if groups
    were held out. They have no updates: trees are fitted to all rows anew in the first prediction after a call of `fit`
    or `partial_fit`.
    """

    _loss = staticmethod(cross_entropy)

    def partial_fit(self, X: Any, y: Any, groups: Any = None, classes: Any = None) -> Self:
        """Add data and update; in the first call, `classes` may list classes that come later."""
        if classes is not None and not hasattr(self, "ensemble_"):
            self._classes = np.unique(classes)
        return super().partial_fit(X, y, groups)

    def predict_proba(self, X: Any, groups: Any = None) -> np.ndarray:
        """Probabilities, (rows, classes), in the order of `classes_`; unknown groups are predicted by the prior."""
        outputs, _, _ = self._outputs(X, groups)
        return (self.ensemble_.weights[:, None, None] * torch.softmax(outputs, -1)).sum(0).numpy()

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """The most probable class of each row."""
        best = self.predict_proba(X, groups).argmax(1)
        return self.classes_[best]

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """The accuracy; without groups, that of the prior."""
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))

    def _begin(self, X: np.ndarray, y: np.ndarray) -> None:
        check_classification_targets(y)
        super()._begin(X, y)
        self.classes_ = self.__dict__.pop("_classes", np.unique(y))
        if unlisted := sorted(set(np.unique(y).tolist()) - set(self.classes_.tolist())):
            raise ValueError(f"y has classes {unlisted}, which are not in classes={self.classes_.tolist()}")
        self._num_outputs = len(self.classes_)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_[0]!r}; a classifier needs two or more classes")

    def _targets(self, y: np.ndarray) -> Tensor:
        unknown = sorted(set(np.unique(y).tolist()) - set(self.classes_.tolist()))
        if unknown:
            raise ValueError(f"classes {unknown} were not in the data given to fit, which had {self.classes_.tolist()}")
        return torch.as_tensor(np.searchsorted(self.classes_, y))


def _checked(groups: Any, X: np.ndarray) -> list[str]:
    """The name of each row's group."""
    if groups is None:
        return ["all"] * len(X)
    values = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    if len(values) != len(X):
        raise ValueError(f"groups has {len(values)} values for {len(X)} rows of X")
    if any(value is None or value != value for value in values):
        raise ValueError("groups has missing values; drop these rows, or give them a group")
    return [_name(value) for value in values]


def _name(value: Any) -> str:
    """The name of a group: 1, 1.0 and NumPy's 1 are one group, 1 and "1" are two."""
    value = value.item() if isinstance(value, np.generic) else value
    return repr(int(value)) if isinstance(value, float) and value.is_integer() else repr(value)


def _rows_of(names: list[str]) -> dict[str, Tensor]:
    """The rows of each group, in the order of first appearance."""
    rows: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        rows.setdefault(name, []).append(i)
    return {name: torch.tensor(index) for name, index in rows.items()}
