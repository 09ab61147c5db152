"""A user's arrays as tensors on the learner's device, in the dtype of its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.losses import squared_error, unsmoothed
from metaleader.tasks import Batch, Tree, as_array, as_tensors, check_batch, to_device

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner


def inputs_of(learner: Learner, x: Tree, where: str) -> Tree:
    """Inputs as tensors; float64 arrays, which NumPy and pandas make by default, get the dtype of the model.

    Tensors keep their dtype.
    """
    return to_device(as_tensors(_in_dtype(x, learner.state.flat.dtype), f"{where}: x"), learner.device)


def batch_of(learner: Learner, x: Tree, y: Tree, where: str) -> Batch:
    """Datapoints as tensors; a one-dimensional y is one column if the loss is `squared_error` and the output is one."""
    dtype = learner.state.flat.dtype
    batch = to_device(check_batch(Batch(_in_dtype(x, dtype), _in_dtype(y, dtype)), where), learner.device)
    if not (isinstance(batch.y, Tensor) and batch.y.ndim == 1 and unsmoothed(learner.loss) is squared_error):
        return batch
    stored = learner.memory.store.data
    if stored is not None:
        shape = stored.y.shape[1:] if isinstance(stored.y, Tensor) else None
    else:
        shape = learner.network.output_shape(learner.params, batch.x)
    return batch._replace(y=batch.y[:, None]) if shape == (1,) else batch


def _in_dtype(tree: Tree, dtype: torch.dtype) -> Tree:
    def convert(leaf: Any) -> Any:
        leaf = as_array(leaf)
        is_double = isinstance(leaf, np.ndarray) and leaf.dtype == np.float64
        return torch.from_numpy(leaf).to(dtype) if is_double else leaf

    return tree_map(convert, tree)
