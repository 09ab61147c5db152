"""Trees for classes of groups: a random forest and gradient boosting that know the group of a row.

Beside the inputs, a row has the class shares of its group and a few numbers of it. The share of a class in a group of n
rows is (rows of the class + s * share among all rows) / (n + s): trees treat groups with similar classes alike. The
numbers are the place of the group in random orders of all groups: trees separate any groups by a few splits, also
those with equal shares. Groups with few rows do not train the trees: their shares would give the label of each row
away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from threadpoolctl import threadpool_limits
from torch import Tensor

from metaleader.tasks import Batch

# s above
_STRENGTH = 3.0
_ORDERS = 4
# Groups with fewer rows do not train the trees.
_LEAST = 5
# Rows that each tree of the forest draws, and rows that boosting takes, at most: bounds the time.
_FOREST_ROWS, _BOOSTED_ROWS = 10_000, 100_000
# This part of the probability is the same for all classes.
_EVEN = {"forest": 1 / 101, "boosted": 1e-3}


class ClassTrees:
    """A forest and boosted trees, fitted to groups of labelled rows.

    Args:
        batches: the rows of each group, of which at least one has five rows or more.
        num_classes: the number of classes.
        seed: of the trees and of the orders of groups.
    """

    def __init__(self, batches: Mapping[str, Batch], num_classes: int, seed: int) -> None:
        labels = torch.cat([batch.y for batch in batches.values()])
        self._prior = np.bincount(labels.numpy(), minlength=num_classes) / len(labels)
        rng = np.random.default_rng(seed)
        orders = np.stack([rng.permutation(len(batches)) for _ in range(_ORDERS)], 1)
        self._groups = {
            name: np.concatenate([self._share(batch.y.numpy()), orders[i]])
            for i, (name, batch) in enumerate(batches.items())
        }
        learned = {name: batch for name, batch in batches.items() if len(batch.y) >= _LEAST}
        x, y = (torch.cat(leaves).numpy() for leaves in zip(*learned.values(), strict=True))
        ends = np.cumsum([0, *(len(batch.y) for batch in learned.values())])
        rows = {name: np.arange(ends[i], ends[i + 1]) for i, name in enumerate(learned)}
        inputs = self._inputs(x, rows)
        settings: dict[str, Any] = {"max_features": 0.5, "max_samples": min(_FOREST_ROWS, len(y)), "random_state": seed}
        forest = RandomForestClassifier(**settings).fit(inputs, y)
        chosen = rng.permutation(len(y))[:_BOOSTED_ROWS] if len(y) > _BOOSTED_ROWS else slice(None)
        boosted = forest
        if len(np.unique(y[chosen])) > 1:
            settings = {"l2_regularization": 1.0, "early_stopping": False, "random_state": seed}
            boosted = HistGradientBoostingClassifier(**settings)
            # On a busy machine, several threads for these short loops can take many times as long as one.
            with threadpool_limits(1, "openmp"):
                boosted.fit(inputs[chosen], y[chosen])
        self._models: dict[str, Any] = {"forest": forest, "boosted": boosted}

    def outputs(self, x: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """The logarithms of the probabilities of the forest and of the boosted trees, (2, rows, classes).

        Groups without data have the shares of all rows, and no numbers.

        Args:
            x: inputs.
            rows: the rows of each group.
        """
        inputs, results = self._inputs(x.numpy(), {name: index.numpy() for name, index in rows.items()}), []
        with threadpool_limits(1, "openmp"):
            for name, model in self._models.items():
                probabilities = np.zeros((len(x), len(self._prior)))
                probabilities[:, model.classes_] = model.predict_proba(inputs)
                results.append((1 - _EVEN[name]) * probabilities + _EVEN[name] / len(self._prior))
        return torch.from_numpy(np.log(np.stack(results)))

    def _inputs(self, x: np.ndarray, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """Each row's x, the class shares of its group, and the places of the group in the orders."""
        of_groups = np.tile([*self._prior, *[np.nan] * _ORDERS], (len(x), 1))
        for name, index in rows.items():
            if name in self._groups:
                of_groups[index] = self._groups[name]
        return np.concatenate([x, of_groups], 1)

    def _share(self, labels: np.ndarray) -> np.ndarray:
        counts = np.bincount(labels, minlength=len(self._prior))
        return (counts + _STRENGTH * self._prior) / (len(labels) + _STRENGTH)
