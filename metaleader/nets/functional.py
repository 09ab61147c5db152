"""An `nn.Module` and a loss as pure functions of the parameters, which may lie in one flat tensor.

Batch norm uses the statistics of the current batch, and dropout masks come from integers that are passed in. Parameters
keep their names. A network with an output for each global class (`TaskLogits`) gets the task's classes with the batch.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.gradient.selection import Params
from metaleader.losses import Loss, squared_error, takes_labels
from metaleader.models import TaskLogits
from metaleader.nets import calls
from metaleader.nets.alike import same_function
from metaleader.nets.convert import adapted_copy, freeze, frozen_names, functional_copy, tied_names
from metaleader.nets.copies import Copies
from metaleader.nets.layers import BatchNorm, SeededDropout
from metaleader.nets.trials import try_loss, try_rows
from metaleader.tasks import Batch, ClassBatch, Tree, num_rows, row_signature, rows

# The batch norm statistics of an adapted net: those of D_t, or those of the rows that the net is called on.
Statistics = Literal["task", "batch"]


def scale_uint8(x: Tree) -> Tree:
    """Scale uint8 tensors to [0, 1] and leave all others unchanged.

    >>> scale_uint8(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([0., 1.])
    """
    return tree_map(lambda leaf: leaf.to(torch.get_default_dtype()) / 255 if leaf.dtype == torch.uint8 else leaf, x)


def _identity(x: Tree) -> Tree:
    return x


class Layout:
    """The position of each parameter in a flat tensor.

    >>> layout = Layout({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
    >>> layout.named(torch.arange(6.0))["bias"]
    tensor([4., 5.])
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._shapes = {name: value.shape for name, value in params.items()}
        self._sizes = [shape.numel() for shape in self._shapes.values()]

    def named(self, flat: Tensor) -> Params:
        """Views of a flat tensor, (..., number of parameters), by name."""
        pairs = zip(self._shapes.items(), flat.split(self._sizes, -1), strict=True)
        return {name: piece.view(flat.shape[:-1] + shape) for (name, shape), piece in pairs}

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `named`, as a new tensor."""
        leading = next(iter(named.values())).ndim - len(next(iter(self._shapes.values())))
        pieces = (named[name] for name in self._shapes)
        return torch.cat([piece.reshape(*piece.shape[:leading], -1) for piece in pieces], -1)


class Network:
    """A module with a loss, as pure functions of the parameters.

    Args:
        module: left unchanged; the network works on a copy.
        loss: of (prediction, target), one value per datapoint or a scalar.
        preprocess: applied to x before the module, in training and in every adapted net.
        device: where the copy is placed; None leaves it where the module is.

    Attributes:
        num_classes: the number of global classes, for a module with `TaskLogits`; otherwise None.
        task_logits: the names of the `TaskLogits` layers.
        frozen: the names of the parameters with requires_grad=False, which are buffers of the functional module.
        own_code: whether the module runs code of the user's, in which calls of torch are replaced.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        preprocess: Callable[[Tree], Tree] | None = scale_uint8,
        device: torch.device | None = None,
    ) -> None:
        self.loss = loss
        self.preprocess = preprocess or _identity
        self.module = functional_copy(module, device)
        self.frozen = frozen_names(module)
        freeze(self.module, self.frozen)
        layers = dict(self.module.named_modules())
        self._dropouts = [name for name, layer in layers.items() if isinstance(layer, SeededDropout)]
        self.has_dropout = bool(self._dropouts)
        self.has_batch_norm = any(isinstance(layer, BatchNorm) for layer in layers.values())
        num_classes = {name: layer.num_classes for name, layer in layers.items() if isinstance(layer, TaskLogits)}
        self.task_logits = list(num_classes)
        self.num_classes = min(num_classes.values(), default=None)
        self._tied = tied_names(self.module)
        self.own_code = calls.has_own_code(self.module)
        self._copies = Copies(self.module)
        self._feature_copies: Copies | None = None
        self._outputs: int | None = None
        self._checked_rows: str | None = None
        self._separates_rows: dict[str, bool] = {}

    def is_like(self, other: Network) -> bool:
        """Whether another network is the same function of its parameters: equal layers, buffers and loss."""
        like = _LIKE.setdefault(self, weakref.WeakSet())
        if other is self or other in like:
            return True
        same = (
            type(self) is type(other)
            and str(self.module) == str(other.module)
            and same_function(self.loss, other.loss)
            and same_function(self.preprocess, other.preprocess)
        )
        pairs = zip(self.module.named_buffers(), other.module.named_buffers(), strict=False)
        same = same and all(one == two and torch.equal(value, buffer) for (one, value), (two, buffer) in pairs)
        if same:
            like.add(other)
        return same

    def params(self) -> Params:
        """A copy of the module's parameters, by name."""
        return {name: value.detach().clone() for name, value in self.module.named_parameters()}

    def frozen_params(self) -> Params:
        """A copy of the parameters with requires_grad=False, by their first name."""
        buffers = dict(self.module.named_buffers())
        return {name: buffers[name].clone() for name in self.frozen if name in buffers}

    def check_frozen(self, values: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless these are values for all frozen parameters."""
        shapes = [
            {name: (value.shape, value.dtype) for name, value in p.items()} for p in (self.frozen_params(), values)
        ]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the state has the frozen parameters {sorted(shapes[1])}, the model {sorted(shapes[0])}: names, shapes"
                " and dtypes must be equal; set requires_grad as in the model that was saved"
            )

    def set_frozen(self, values: Mapping[str, Tensor]) -> None:
        """Replace the values of the frozen parameters."""
        if not self.frozen:
            return
        for name, buffer in self.module.named_buffers():
            if name in values and name in self.frozen:
                buffer.copy_(values[name])
        _LIKE.clear()

    def predict(self, params: Params, x: Tree, noise: Tensor | None = None, classes: Tensor | None = None) -> Tensor:
        """The prediction for a batch of inputs of one task; dropout is active when noise is given.

        With classes, (n,), a module with `TaskLogits` predicts one of these.
        """
        if torch.compiler.is_compiling():  # traced, not run: the module does not change
            return self._call(self.module, params, x, noise, classes)
        try:
            module = self._copies.free.pop()  # atomic
        except IndexError:
            module = self._copies.another()
        prediction = self._call(module, params, x, noise, classes)
        self._copies.free.append(module)
        return prediction

    def _call(self, module: nn.Module, params: Params, x: Tree, noise: Tensor | None, classes: Tensor | None) -> Tensor:
        state = {name: params[first] for name, first in self._tied.items()}
        for i, name in enumerate(self._dropouts):
            layer = cast(SeededDropout, module.get_submodule(name))
            layer.train(noise is not None)
            layer.num_calls = 0
            if noise is not None:
                state[f"{name}.seed"] = noise + i
        if classes is not None:
            state |= {f"{name}.classes": classes for name in self.task_logits}
        if self.own_code:
            return calls.call_replaced(module, state, self.preprocess(x))
        # Not tie_weights: with a layer that is used twice, torch 2.13 leaves these tensors in the module.
        return functional_call(module, state, (self.preprocess(x),), tie_weights=False)

    def last_linear(self) -> tuple[str, nn.Linear]:
        """The linear layer with the last parameter, and the prefix of its parameters' names.

        Raises:
            ValueError: if the last parameter belongs to another kind of layer.
        """
        *_, (last, _) = self.module.named_parameters()
        name = last.rpartition(".")[0]
        layer = self.module.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"the last layer of the model must be nn.Linear, got {type(layer).__name__} ({last})")
        return f"{name}." if name else "", layer

    def features(self, params: Params, x: Tree, statistics_of: Tree | None = None) -> Tensor:
        """The inputs of the last linear layer for a batch of inputs of one task, without dropout.

        With `statistics_of`, batch norm uses the statistics of these rows of the task.
        """
        if self._feature_copies is None:
            # It shares the buffers, frozen parameters among them, which `set_frozen` changes in place.
            module, prefix = Copies(self.module).another(), self.last_linear()[0]
            parent, _, child = prefix.rstrip(".").rpartition(".")
            if child:
                setattr(module.get_submodule(parent), child, nn.Identity())
            self._feature_copies = Copies(module if child else nn.Identity())
        compiling = torch.compiler.is_compiling()  # traced, not run: the module does not change
        copies = self._feature_copies
        with contextlib.nullcontext(copies.original) if compiling else copies.borrow() as module:
            names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
            state = {name: params[first] for name, first in self._tied.items() if name in names}
            call = lambda x: calls.call(module, state, self.preprocess(x), self.own_code)  # noqa: E731
            if statistics_of is None or not self.has_batch_norm:
                return call(x)
            with _keeping(module):
                call(statistics_of)
                return call(x)

    def predict_with_statistics_of(self, data: Tree, params: Params, x: Tree, classes: Tensor | None = None) -> Tensor:
        """The prediction for x, with the batch norm statistics of other rows of the task."""
        with self._copies.borrow() as module, _keeping(module):
            self._call(module, params, data, None, classes)
            return self._call(module, params, x, None, classes)

    def loss_fn(self, params: Params, batch: Batch | ClassBatch, noise: Tensor | None = None) -> Tensor:
        """The mean loss over the datapoints of a batch."""
        classes = batch.classes if isinstance(batch, ClassBatch) else None
        return self.mean_loss(self.predict(params, batch.x, noise, classes), batch.y)

    def mean_loss(self, prediction: Tensor, y: Tree) -> Tensor:
        """The mean loss of the predictions for a batch; `check` tests the shape of the loss."""
        return self.loss(prediction, y).mean()

    def adapted(
        self,
        params: Params,
        data: Batch | None,
        statistics: Statistics = "task",
        *,
        example: Batch | None = None,
        classes: Tensor | None = None,
    ) -> nn.Module:
        """A module with these parameters, ready for use; see `adapted_copy`."""
        return adapted_copy(self.module, params, self.preprocess, data, statistics, example, classes, self.frozen)

    @torch.no_grad()
    def separates_rows(self, params: Params, batch: Batch) -> bool:
        """Whether the output and the loss of a datapoint do not depend on other rows; tried once per kind of rows."""
        if self.has_batch_norm:
            return False
        kind = row_signature(batch)
        if kind not in self._separates_rows:
            index = torch.arange(3, device=_device(batch)) % num_rows(batch)
            values = []
            for changed in (batch, tree_map(_changed, batch)):
                of_changed = rows(changed, index)
                first = rows(batch, index[:1])
                mixed = tree_map(lambda one, others: torch.cat([one, others[1:]]), first, of_changed)
                prediction = self.predict(params, mixed.x)
                loss = self.loss(prediction, mixed.y)
                values.append((prediction, loss) if isinstance(loss, Tensor) and loss.shape == (3,) else None)
            if None in values:
                self._separates_rows[kind] = False
            else:
                (one, one_loss), (other, other_loss) = values
                same = torch.allclose(one[0], other[0], 1e-4, 1e-6)
                self._separates_rows[kind] = same and torch.allclose(one_loss[0], other_loss[0], 1e-4, 1e-6)
        return self._separates_rows[kind]

    @torch.no_grad()
    def output_shape(self, params: Params, x: Tree) -> torch.Size | None:
        """The shape of the output for one datapoint; None if the module fails or has no row per datapoint."""
        try:
            prediction = self.isolated().predict(params, rows(x, slice(0, 2)))
        except Exception:
            return None
        return prediction.shape[1:] if isinstance(prediction, Tensor) and prediction.ndim else None

    @torch.no_grad()
    def check(self, params: Params, batch: Batch, where: str) -> None:
        """Reject datapoints that the module or the loss cannot take, before anything is stored."""
        if (kind := row_signature(batch)) != self._checked_rows:
            self._outputs, self._checked_rows = try_rows(self.isolated(), params, batch, where), kind
        if self.loss is squared_error:  # it takes all values of one shape
            return
        if takes_labels(self.loss):
            self._check_labels(batch.y, where)
        else:
            try_loss(self, params, batch, where)

    def _check_labels(self, y: Tensor, where: str) -> None:
        low, high = int(y.min()), int(y.max())
        assert self._outputs is not None
        if low < 0 or high >= self._outputs:
            raise ValueError(
                f"{where}: labels must lie in 0..{self._outputs - 1}, the model has {self._outputs} outputs; got"
                f" {low}..{high}"
            )

    def isolated(self) -> Network:
        """A copy with a module of its own, for modules that may change themselves."""
        isolated = copy.copy(self)
        isolated.module = copy.deepcopy(self.module)
        isolated._copies = Copies(isolated.module, [isolated.module])
        return isolated


def _changed(leaf: Tensor) -> Tensor:
    """Other values of the same kind."""
    return leaf * 0.5 + 0.1 if leaf.is_floating_point() else leaf.flip(0)


@contextlib.contextmanager
def _keeping(module: nn.Module) -> Iterator[None]:
    """In this context, all calls of a module use the batch norm statistics of the first call."""
    with contextlib.ExitStack() as stack:
        for layer in module.modules():
            if isinstance(layer, BatchNorm):
                stack.enter_context(layer.keeping())
        yield


# The networks found to be like each network
_LIKE: weakref.WeakKeyDictionary[Network, weakref.WeakSet[Network]] = weakref.WeakKeyDictionary()


def _device(tree: Tree) -> torch.device:
    """The device of a tree of tensors."""
    return tree_leaves(tree)[0].device
