"""A module as a pure function of its parameters: what turns an `nn.Module` and a loss into the kernel's `loss_fn`.

Batch norm takes the statistics of the batch at hand, dropout masks come from integers that are passed in, and
everything else of the module stays as it is: same parameters, same names. A net with an output for each global class
(`TaskLogits`) gets the task's classes with the batch.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.gradient.inner import Params
from metaleader.losses import Loss, takes_labels
from metaleader.models import TaskLogits
from metaleader.nets.layers import BatchNorm, Conv2d, Linear, SeededDropout
from metaleader.tasks import Batch, ClassBatch, Tree, num_rows, row_signature, rows

# What batch norm divides by in an adapted net: D_t's statistics, or those of the rows it is called on.
Statistics = Literal["task", "batch"]


def scale_uint8(x: Tree) -> Tree:
    """Scale uint8 tensors to [0, 1] and leave all others as they are.

    >>> scale_uint8(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([0., 1.])
    """
    return tree_map(lambda leaf: leaf.to(torch.get_default_dtype()) / 255 if leaf.dtype == torch.uint8 else leaf, x)


class Network:
    """A module with a loss, as pure functions of the parameters.

    Args:
        module: left as it is; the network works on a copy.
        loss: of (prediction, target), one value a datapoint or a scalar.
        preprocess: applied to x before the module, in training and in every adapted net.

    Attributes:
        num_classes: the number of global classes, for a module with `TaskLogits`; otherwise None.
        choosers: the names of the `TaskLogits` layers.
    """

    def __init__(self, module: nn.Module, loss: Loss, preprocess: Callable[[Tree], Tree] | None = scale_uint8) -> None:
        self.loss = loss
        self.preprocess = preprocess or (lambda x: x)
        self.module = _functional_copy(module)
        self._dropouts = [name for name, part in self.module.named_modules() if isinstance(part, SeededDropout)]
        self.has_dropout = bool(self._dropouts)
        chosen = {n: part.num_classes for n, part in self.module.named_modules() if isinstance(part, TaskLogits)}
        self.choosers = list(chosen)
        self.num_classes = min(chosen.values(), default=None)
        self._tied = _tied_names(self.module)
        self.has_batch_norm = any(isinstance(part, BatchNorm) for part in self.module.modules())
        self.outputs: int | None = None
        self._tried: str | None = None

    def params(self) -> Params:
        """A copy of the module's own parameters, by name."""
        return {name: value.detach().clone() for name, value in self.module.named_parameters()}

    def predict(self, params: Params, x: Tree, noise: Tensor | None = None, classes: Tensor | None = None) -> Tensor:
        """The prediction for a batch of inputs of one task; dropout is active when noise is given.

        With classes, (n,), a module with `TaskLogits` predicts one of these.
        """
        state = {name: params[first] for name, first in self._tied.items()}
        for i, name in enumerate(self._dropouts):
            layer = cast(SeededDropout, self.module.get_submodule(name))
            layer.train(noise is not None)
            layer.num_calls = 0
            if noise is not None:
                state[f"{name}.seed"] = noise + i
        if classes is not None:
            state |= {f"{name}.classes": classes for name in self.choosers}
        # Not tie_weights: with a layer that is used twice, torch 2.13 leaves these tensors in the module.
        return functional_call(self.module, state, (self.preprocess(x),), tie_weights=False)

    def predict_by(self, seen: Tree, params: Params, x: Tree, classes: Tensor | None = None) -> Tensor:
        """The prediction for x with batch norm by the statistics of other rows of the task."""
        norms = [part for part in self.module.modules() if isinstance(part, BatchNorm)]
        with contextlib.ExitStack() as stack:
            for norm in norms:
                stack.enter_context(norm.keeping())
            self.predict(params, seen, None, classes)
            return self.predict(params, x, None, classes)

    def loss_fn(self, params: Params, batch: Batch | ClassBatch, noise: Tensor | None = None) -> Tensor:
        """The kernel's loss: the mean over the datapoints of a batch."""
        classes = batch.classes if isinstance(batch, ClassBatch) else None
        return self.mean_loss(self.predict(params, batch.x, noise, classes), batch.y)

    def mean_loss(self, prediction: Tensor, y: Tree) -> Tensor:
        """The mean loss of predictions for the datapoints of a batch."""
        return _mean(self.loss(prediction, y), num_rows(y))

    @torch.no_grad()
    def adapted(
        self,
        params: Params,
        data: Batch | None,
        statistics: Statistics = "task",
        *,
        like: Batch | None = None,
        classes: Tensor | None = None,
    ) -> nn.Module:
        """A module with these parameters, ready for use: dropout off, inputs preprocessed, one row or many.

        Args:
            params: copied into the module; its `state_dict` loads into the module the network was made from.
            data: the task's datapoints, whose statistics batch norm takes with `statistics="task"`.
            statistics: "task", or "batch" for the statistics of the rows that the net is called on, as in the paper.
            like: datapoints of an earlier task, which show a single row where there is no `data` yet.
            classes: of the task, which `TaskLogits` chooses from then on.
        """
        if statistics not in ("task", "batch"):
            raise ValueError(f"statistics must be 'task' or 'batch', got {statistics!r}")
        net = copy.deepcopy(self.module)
        for part in net.modules():
            if type(part) is Linear:
                part.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]
        for name, value in net.named_parameters():
            value.requires_grad_(True).copy_(params[name])
        net.eval()
        if classes is not None:
            for name in self.choosers:
                cast(TaskLogits, net.get_submodule(name)).classes = classes
        norms = [part for part in net.modules() if isinstance(part, BatchNorm)]
        if norms and statistics == "task" and data is not None:
            for norm in norms:
                norm.keep_next = True
            net(self.preprocess(data.x))
        shown = data or like
        door = _Door(self.preprocess, [leaf.ndim - 1 for leaf in tree_leaves(shown.x)] if shown else None)
        net.register_forward_pre_hook(door.enter)
        net.register_forward_hook(door.leave)
        return net

    @torch.no_grad()
    def check(self, params: Params, batch: Batch, where: str) -> None:
        """Refuse datapoints that the module or the loss cannot take, before anything is kept.

        Rows of a new shape are tried on two of them (a single one twice, since a number alone looks like a row, and
        alone), the second-order computation too, which finds modules that cannot be made functional.
        """
        for leaf in tree_leaves(batch.x):
            dtype = next(iter(params.values())).dtype
            if leaf.is_floating_point() and leaf.dtype != dtype:
                raise ValueError(
                    f"{where}: x is {leaf.dtype}, the model's parameters are {dtype}; convert with x.to({dtype})"
                )
        if row_signature(batch) != self._tried:
            # On a copy: a module that changes itself must not leave a trace.
            module, self.module = self.module, copy.deepcopy(self.module)
            try:
                self._try(params, rows(batch, torch.arange(2, device=num_device(batch)) % num_rows(batch)), where)
                if num_rows(batch) == 1:
                    self._try_loss(params, Batch(batch.x, _safe_labels(batch.y, self.loss)), where)
            finally:
                self.module = module
        if not takes_labels(self.loss):
            self._try_loss(params, batch, where)
        else:
            low, high = int(batch.y.min()), int(batch.y.max())
            assert self.outputs is not None
            if low < 0 or high >= self.outputs:
                raise ValueError(
                    f"{where}: labels must lie in 0..{self.outputs - 1}, the model has {self.outputs} outputs; got"
                    f" {low}..{high}"
                )

    def _try(self, params: Params, batch: Batch, where: str) -> None:
        batch = Batch(batch.x, _safe_labels(batch.y, self.loss))
        prediction = self._try_loss(params, batch, where)
        self._try_functional(params, batch)
        self.outputs = prediction.shape[-1] if prediction.ndim > 1 else 1
        self._tried = row_signature(batch)

    def _try_loss(self, params: Params, batch: Batch, where: str) -> Tensor:
        try:
            prediction = self.predict(params, batch.x)
        except Exception as error:
            raise ValueError(
                f"{where}: the model fails on x with rows of {row_signature(batch.x)}: {_first_line(error)}; pass x of"
                " the shape and dtype that the model takes"
            ) from error
        if not isinstance(prediction, Tensor) or prediction.shape[:1] != (num_rows(batch.y),):
            got = tuple(prediction.shape) if isinstance(prediction, Tensor) else type(prediction).__name__
            raise ValueError(f"{where}: the model must return a tensor with one row a datapoint, got {got}")
        try:
            self.mean_loss(prediction, batch.y)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        except Exception as error:
            raise ValueError(
                f"{where}: the loss fails on prediction {tuple(prediction.shape)} {prediction.dtype} and target"
                f" {row_signature(batch.y)}: {_first_line(error)}; pass y as the loss takes it"
            ) from error
        return prediction

    def _try_functional(self, params: Params, batch: Batch) -> None:
        noise = (torch.zeros(2, dtype=torch.int64, device=num_device(batch)),) if self._dropouts else ()
        buffers = {name: (buffer, buffer._version) for name, buffer in self.module.named_buffers()}

        def curvature(params: Params, batch: Batch, *noise: Tensor) -> Params:
            def squared(params: Params) -> Tensor:
                gradient = grad(lambda p: self.loss_fn(p, batch, *noise))(params)
                return torch.stack([value.square().sum() for value in gradient.values()]).sum()

            return grad(squared)(params)

        two_tasks = tree_map(lambda leaf: torch.stack([leaf, leaf]), (params, batch))
        try:
            with sdpa_kernel(SDPBackend.MATH):
                vmap(curvature)(*two_tasks, *noise)
            for name, buffer in self.module.named_buffers():
                if buffer is not buffers[name][0] or buffer._version != buffers[name][1]:
                    raise ValueError(f"its forward changes the buffer {name!r}")
        except Exception as error:
            raise ValueError(
                f"{type(self.module).__name__} cannot be run as a pure function of its parameters, for several tasks"
                f" at once and twice differentiated: {_first_line(error)}. Layers must not draw random numbers of their"
                " own (nn.Dropout is handled), change buffers, or branch on values; recurrent layers work as cells"
            ) from error


class _Door:
    """Hooks around an adapted net: preprocess the inputs, and let a single row in and out."""

    def __init__(self, preprocess: Callable[[Tree], Tree], row_dims: list[int] | None) -> None:
        self.preprocess = preprocess
        self.row_dims = row_dims
        self.single = False

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        self.single = [leaf.ndim for leaf in tree_leaves(x)] == self.row_dims
        if self.single:
            x = tree_map(lambda leaf: leaf[None], x)
        return (self.preprocess(x), *rest)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output[0] if self.single else output


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CHANNEL_DROPOUT = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _functional_copy(module: nn.Module) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ValueError(f"the model must be an nn.Module, or a function that builds one; got {type(module).__name__}")
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.lazy.LazyModuleMixin) and part.has_uninitialized_params():  # type: ignore[misc]
            raise ValueError(f"layer {name!r} is lazy and has no shape yet; call the model on one batch first")
        if isinstance(part, nn.AlphaDropout | nn.FeatureAlphaDropout):
            raise ValueError(f"layer {name!r} is {type(part).__name__}, which cannot be replayed; use nn.Dropout")
        if isinstance(part, nn.MultiheadAttention) and part.dropout > 0:
            raise ValueError(f"layer {name!r}: set dropout=0 in MultiheadAttention and use nn.Dropout after it")
    if not any(True for _ in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no parameters to learn")
    module = copy.deepcopy(module).train()
    module.requires_grad_(False)
    tracked = []
    replaced: dict[nn.Module, nn.Module] = {}
    for name, part in list(module.named_modules()):
        if part._forward_hooks or part._forward_pre_hooks:
            continue
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and type(part) in _BATCH_NORMS:
            if part.track_running_stats:
                tracked.append(name)
            replaced[part] = BatchNorm(part)
        elif type(part) is nn.Conv2d and Conv2d.replaces(part):
            replaced[part] = Conv2d(part)
        elif type(part) is nn.Linear:
            part.__class__ = Linear
        elif isinstance(part, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            replaced[part] = SeededDropout(part.p, isinstance(part, _CHANNEL_DROPOUT))
    for parent in list(module.modules()):
        # Not named_children: it leaves out a layer's second name under one parent.
        for name, child in parent._modules.items():
            if child in replaced:
                setattr(parent, name, replaced[child])
    if tracked:
        warnings.warn(
            f"batch norm layers {tracked} keep running statistics; metaleader uses the statistics of the current batch"
            " in training, and those of the task's data in the nets that adapt() returns",
            stacklevel=4,
        )
    return replaced.get(module, module)


def _tied_names(module: nn.Module) -> dict[str, str]:
    """The names under which the layers of a module hold parameters, each with the first name of the same parameter."""
    first: dict[Tensor, str] = {}
    return {
        name: first.setdefault(value, name)
        for prefix, part in module.named_modules()
        for name, value in part.named_parameters(prefix, recurse=False)
    }


def _mean(loss: Any, num: int) -> Tensor:
    if not isinstance(loss, Tensor) or loss.shape not in ((), (num,)):
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss must return one value a datapoint, ({num},), or a scalar; got {got}")
    return loss.mean()


def _safe_labels(y: Tree, loss: Loss) -> Tree:
    """Labels for a trial run, where the range is not checked yet."""
    return torch.zeros_like(y) if takes_labels(loss) and isinstance(y, Tensor) and not y.is_floating_point() else y


def num_device(tree: Tree) -> torch.device:
    """The device of a tree of tensors."""
    return tree_leaves(tree)[0].device


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
