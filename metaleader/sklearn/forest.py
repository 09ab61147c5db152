"""A random forest for classes of groups: trees over the inputs and the class shares of the row's group.

The share of a class in a group of n rows is (rows of the class + s * share among all rows) / (n + s). The shares let
the trees separate groups, and treat groups with similar classes alike. Groups with few rows do not train the trees:
their shares would give the label of each row away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import RandomForestClassifier
from torch import Tensor

from metaleader.tasks import Batch

# s above
_STRENGTH = 3.0
# Groups with fewer rows do not train the trees.
_LEAST = 5
# Rows that each tree draws, at most: bounds the time.
_ROWS = 10_000


class ClassForest:
    """Trees fitted to groups of labelled rows.

    Args:
        batches: the rows of each group, of which at least one has five rows or more.
        num_classes: the number of classes.
        seed: of the trees.
    """

    def __init__(self, batches: Mapping[str, Batch], num_classes: int, seed: int) -> None:
        labels = torch.cat([batch.y for batch in batches.values()])
        self._prior = np.bincount(labels.numpy(), minlength=num_classes) / len(labels)
        self._shares = {name: self._share(batch.y.numpy()) for name, batch in batches.items()}
        learned = {name: batch for name, batch in batches.items() if len(batch.y) >= _LEAST}
        x, y = (torch.cat(leaves) for leaves in zip(*learned.values(), strict=True))
        shares = np.repeat([self._shares[name] for name in learned], [len(b.y) for b in learned.values()], axis=0)
        settings: dict[str, Any] = {"max_features": 0.5, "max_samples": min(_ROWS, len(y)), "random_state": seed}
        self._trees = RandomForestClassifier(**settings).fit(np.concatenate([x.numpy(), shares], 1), y.numpy())

    def outputs(self, x: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """The logarithms of the probabilities, (rows, classes); groups without data have the shares of all rows.

        Args:
            x: inputs.
            rows: the rows of each group.
        """
        shares = np.tile(self._prior, (len(x), 1))
        for name, index in rows.items():
            shares[index.numpy()] = self._shares.get(name, self._prior)
        probabilities = np.zeros((len(x), len(self._prior)))
        probabilities[:, self._trees.classes_] = self._trees.predict_proba(np.concatenate([x.numpy(), shares], 1))
        # As if one more tree took all classes for equally probable.
        num = len(self._trees.estimators_)
        return torch.from_numpy(np.log((probabilities * num + 1 / len(self._prior)) / (num + 1)))

    def _share(self, labels: np.ndarray) -> np.ndarray:
        counts = np.bincount(labels, minlength=len(self._prior))
        return (counts + _STRENGTH * self._prior) / (len(labels) + _STRENGTH)
