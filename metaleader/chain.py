"""A network seen as a chain: convolutions with batch norm and ReLU between them, then a head that may be anything.

For such a network the meta-gradient needs no automatic differentiation through the convolutions. With flat parameters
theta and the loss L(theta) of one task, an inner step is a forward and a backward pass, and the adjoint step

    lambda_s = lambda_{s+1} - H(theta_s) v,    v = D lambda_{s+1},    D the diagonal of step sizes,

is the tangent of these two passes in direction v, by the same three products of a convolution (forward, gradient of
its input, gradient of its weight). What the passes of an inner step left behind is kept for it. The head, from the
last batch norm on, is differentiated by torch: one task's loss and gradient, and the gradient of an inner product,
vmapped over tasks.

Images are held as (tasks, rows, channels), a row for each pixel of each image: channels come last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.compiled import compile_whole, compiling
from metaleader.inner import Params, moving_names
from metaleader.layers import BatchNorm, Conv2d
from metaleader.network import Network
from metaleader.objective import Objective
from metaleader.tasks import Batch, ClassBatch


class Layer(NamedTuple):
    """A convolution of a chain, with the batch norm before it (of its input; the first layer has none)."""

    weight: str
    norm: str | None
    eps: float
    channels: int
    filters: int
    kernel: int
    stride: int
    padding: int


@dataclass(frozen=True)
class Chain:
    """A network divided into convolutions and a head.

    Attributes:
        layers: the convolutions.
        head: the rest, from the last convolution's batch norm on; its parameters keep their names.
        silent: parameters without effect: the biases of convolutions, which batch norm takes out again.
    """

    network: Network
    layers: tuple[Layer, ...]
    head: nn.Module
    silent: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """All parameters of the network."""
        return [name for name, _ in self.network.module.named_parameters()]

    @property
    def head_names(self) -> list[str]:
        """The parameters of the head."""
        return [name for name, _ in self.head.named_parameters()]

    def head_loss(self, y: Tensor, params: Params, target: Any, size: tuple[int, int]) -> Tensor:
        """The loss of one task, given the last convolution's output (rows, filters) for images of a size.

        The target is the batch without its images: targets, and for a `ClassBatch` the task's classes.
        """
        images = y.view(-1, *size, y.shape[-1]).permute(0, 3, 1, 2)
        state = params | {f"{name}.classes": target[1] for name in self.network.choosers if len(target) > 1}
        return self.network.mean_loss(functional_call(self.head, state, (images,)), target[0])


def find_chain(network: Network) -> Chain | None:
    """Divide a network, if it is a sequence that begins with a plain convolution, batch norm and ReLU."""
    module = network.module
    if type(module) is not nn.Sequential or network.has_dropout or _has_hooks(module):
        return None
    parts = list(module.named_children())
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if len(names) != len(dict(module.named_parameters())) or len(parts) != len(module):
        return None  # a layer or a tensor that is used twice
    layers: list[Layer] = []
    silent: list[str] = []
    norm: tuple[str, BatchNorm] | None = None
    while len(parts) > 3 * len(layers) + 2:
        (name, conv), (norm_name, after), (_, relu) = parts[3 * len(layers) : 3 * len(layers) + 3]
        if not _is_block(conv, after, relu):
            break
        assert isinstance(conv, Conv2d)
        assert isinstance(after, BatchNorm)
        filters, channels, kernel, _ = conv.weight.shape
        layers.append(
            Layer(
                f"{name}.weight",
                norm[0] if norm else None,
                norm[1].eps if norm else 0.0,
                channels,
                filters,
                kernel,
                conv.stride[0],
                conv.padding[0],
            )
        )
        silent += [f"{name}.bias"] if conv.bias is not None else []
        norm = norm_name, after
    if not layers:
        return None
    head = nn.Sequential(OrderedDict(parts[3 * len(layers) - 2 :]))
    return Chain(network, tuple(layers), head, tuple(silent))


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _is_block(conv: nn.Module, norm: nn.Module, relu: nn.Module) -> bool:
    if any(_has_hooks(part) for part in (conv, norm, relu)):
        return False
    if type(conv) is not Conv2d or type(norm) is not BatchNorm or type(relu) is not nn.ReLU:
        return False
    square = all(len(set(pair)) == 1 for pair in (conv.stride, conv.padding, conv.weight.shape[2:]))
    return square and norm.weight is not None and norm.bias is not None


class Plan:
    """Where everything is in the flat parameters of a chain's convolutions, and the sizes of its images.

    The first layer sees patches of the images, so its weight is that of a 1x1 convolution.

    Args:
        layers: the convolutions.
        size: (height, width) of the images.
        multiple: the inputs of the first layer are padded with zeros to a multiple of this.

    Attributes:
        sizes: (height, width) of every layer's input, then of the last one's output.
        starts: for each layer, where its weight begins; its batch norm's scale and shift come before it.
        total: the number of flat parameters a task.
        largest: the numbers in the patches of an image, at the layer where they are most.
    """

    def __init__(self, layers: tuple[Layer, ...], size: tuple[int, int], multiple: int = 1) -> None:
        self.layers = layers
        self.sizes = [size]
        self.inputs: list[int] = []
        self.starts: list[int] = []
        at = 0
        for i, layer in enumerate(layers):
            high, wide = self.sizes[-1]
            reach = 2 * layer.padding - layer.kernel
            self.sizes.append(((high + reach) // layer.stride + 1, (wide + reach) // layer.stride + 1))
            width = layer.kernel**2 * layer.channels
            self.inputs.append(-(-width // multiple) * multiple if i == 0 else width)
            at += 2 * layer.channels if i else 0
            self.starts.append(at)
            at += self.inputs[-1] * layer.filters
        self.total = at
        outputs = (high * wide for high, wide in self.sizes[1:])
        self.largest = max(inputs * output for inputs, output in zip(self.inputs, outputs, strict=True))

    def weight(self, flat: Tensor, i: int) -> Tensor:
        """The weight of layer i, (tasks, inputs, filters), as a view of the flat parameters."""
        stop = self.starts[i] + self.inputs[i] * self.layers[i].filters
        return flat[:, self.starts[i] : stop].unflatten(1, (self.inputs[i], self.layers[i].filters))

    def norm(self, flat: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """Scale and shift of the batch norm before layer i, (tasks, 1, channels) each."""
        channels, stop = self.layers[i].channels, self.starts[i]
        return flat[:, None, stop - 2 * channels : stop - channels], flat[:, None, stop - channels : stop]

    def flatten(self, params: Params) -> Tensor:
        """The convolutions' parameters, (tasks, ...) each, as flat ones."""
        parts = []
        for i, layer in enumerate(self.layers):
            if layer.norm:
                parts += [params[f"{layer.norm}.weight"], params[f"{layer.norm}.bias"]]
            weight = params[layer.weight].permute(0, 3, 4, 2, 1).flatten(1, 3)
            parts.append(F.pad(weight, (0, 0, 0, self.inputs[i] - weight.shape[1])).flatten(1))
        return torch.cat(parts, 1)

    def unflatten(self, flat: Tensor) -> Params:
        """The inverse of `flatten`."""
        params = {}
        for i, layer in enumerate(self.layers):
            if layer.norm:
                scale, shift = self.norm(flat, i)
                params |= {f"{layer.norm}.weight": scale[:, 0], f"{layer.norm}.bias": shift[:, 0]}
            weight = self.weight(flat, i)[:, : layer.kernel**2 * layer.channels]
            window = (layer.kernel, layer.kernel, layer.channels)
            params[layer.weight] = weight.unflatten(1, window).permute(0, 4, 3, 1, 2)
        return params

    def patches(self, images: Tensor) -> Tensor:
        """What the first layer sees of images (tasks, images, channels, height, width): (tasks, rows, inputs)."""
        layer = self.layers[0]
        columns = columns_of(images.permute(0, 1, 3, 4, 2), layer)
        return F.pad(columns, (0, self.inputs[0] - columns.shape[2]))


def columns_of(images: Tensor, layer: Layer) -> Tensor:
    """Patches (tasks, rows, kernel * kernel * channels) of images (tasks, images, height, width, channels)."""
    pad = layer.padding
    return windows_of(F.pad(images, (0, 0, pad, pad, pad, pad)), layer)


def windows_of(images: Tensor, layer: Layer) -> Tensor:
    """The same of images that are padded already."""
    windows = images.unfold(2, layer.kernel, layer.stride).unfold(3, layer.kernel, layer.stride)
    return windows.permute(0, 1, 2, 3, 5, 6, 4).flatten(4).flatten(1, 3)


class Passes(Protocol):
    """The four passes through the convolutions; `TorchPasses`, or `TritonPasses` on a GPU."""

    plan: Plan

    def forward(self, flat: Tensor, patches: Tensor) -> tuple[Tensor, Any]:
        """The last convolution's output, and what the other passes need."""
        ...

    def backward(self, flat: Tensor, saved: Any, slope: Tensor) -> Tensor:
        """The gradient with respect to the flat parameters, in parts (tasks, parts, total) that add up."""
        ...

    def forward_tangent(self, flat: Tensor, saved: Any, v: Tensor) -> tuple[Tensor, Any]:
        """The tangent of `forward` in direction v of the parameters, and what `backward_tangent` needs of it."""
        ...

    def backward_tangent(self, flat: Tensor, saved: Any, v: Tensor, moved: Any, slope_dot: Tensor) -> Tensor:
        """The tangent of `backward`: the Hessian times v, in parts."""
        ...

    def descend(self, base: Tensor, parts: Tensor, rates: Tensor | None) -> Tensor:
        """Subtract the sum of the parts, times step sizes if there are any."""
        ...


# The size of the largest tensor that a chain works with on the CPU: eagerly, and compiled, when calls are few and what
# they leave should stay in the cache.
_CPU_NUMBERS = {False: 2**22, True: 2**20}


class ChainGradient:
    """The gradient of an update of a chain, for learners side by side; every tensor has replicas in front, then tasks.

    Args:
        chain: the network.
        objective: what the update minimises.
        passes: the passes through the convolutions.
        compiled: whether the head goes through torch.compile.
        keep: how many inner steps' passes are kept for their adjoint steps; with more inner steps, all are computed
            anew, and memory grows with the parameters only.
    """

    def __init__(self, chain: Chain, objective: Objective, passes: Passes, compiled: bool, keep: int = 5) -> None:
        self.chain, self.objective, self.passes, self.plan = chain, objective, passes, passes.plan
        self.keep = objective.inner_steps <= keep
        self._moving = moving_names(chain.names, objective.only)
        # Whether the inner loop changes what the convolutions make of the images.
        self._body_moves = bool(self._moving - {*chain.head_names, *chain.silent})
        self._flat_rates: Tensor | None = None
        self._compiled = compiled
        wrap = compile_whole if compiled else (lambda f: f)
        self._prepare, self._step = wrap(self._prepare_images), wrap(self._head_step)
        self._query, self._curve = wrap(self._head_gradient), wrap(self._head_curve)
        self._spread, self._collect = wrap(self._spread_params), wrap(self._collect_tasks)

    @torch.no_grad()
    def __call__(
        self, params: Params, support: Batch | ClassBatch, query: Batch | ClassBatch, noise: None = None
    ) -> tuple[Tensor, Params]:
        """Losses (replicas,) and gradients."""
        # Fused attention, in the head, has no second derivative; the plain one has.
        with compiling() if self._compiled else sdpa_kernel(SDPBackend.MATH):
            return self._mean(params, support, query)

    def _mean(self, params: Params, support: Batch | ClassBatch, query: Batch | ClassBatch) -> tuple[Tensor, Params]:
        replicas, num_tasks = tree_leaves(query)[0].shape[:2]
        chunk = self.objective.chunk or num_tasks
        if not tree_leaves(query)[0].is_cuda:
            # Tensors that a CPU's allocator keeps, instead of asking the system for their pages each time.
            images = max(tree_leaves(batch)[0].shape[2] for batch in (support, query))
            most = _CPU_NUMBERS[self._compiled] // (replicas * images * self.plan.largest)
            chunk = min(chunk, max(1, most))
            if self._compiled:
                # A smaller rest would be compiled once more.
                even = max(size for size in range(1, chunk + 1) if num_tasks % size == 0)
                chunk = even if 2 * even > chunk else chunk
        total: tuple[Tensor, Params] | None = None
        for start in range(0, num_tasks, chunk):
            part = lambda leaf: leaf[:, start : start + chunk]  # noqa: B023, E731
            share = self._part(params, tree_map(part, support), tree_map(part, query), num_tasks)
            total = share if total is None else tree_map(torch.add, total, share)
        assert total is not None
        return total

    def _part(
        self, params: Params, support: Batch | ClassBatch, query: Batch | ClassBatch, num_tasks: int
    ) -> tuple[Tensor, Params]:
        """What some of the tasks add to the mean."""
        tasks = tree_leaves(query)[0].shape[1]
        support, query = tree_map(lambda leaf: leaf.flatten(0, 1), (support, query))
        flat, head = self._spread(params, tasks)
        path = self._way_through_all if self._body_moves or not self.objective.inner_steps else self._way_through_head
        losses, lam, lam_head = path(flat, head, self._rates(params), support, query)
        return self._collect(params, losses, lam, lam_head, num_tasks)

    def _spread_params(self, params: Params, tasks: int) -> tuple[Tensor, Params]:
        """The convolutions' parameters, flat, and the head's, for each task of each replica."""
        # Copies: of one replica, an expanded tensor would stay a view, which kernels cannot read.
        spread = lambda value: value[:, None].expand(-1, tasks, *value.shape[1:]).contiguous().flatten(0, 1)  # noqa: E731
        return spread(self.plan.flatten(params)), {name: spread(params[name]) for name in self.chain.head_names}

    def _collect_tasks(
        self, params: Params, losses: Tensor, lam: Tensor, lam_head: Params, num_tasks: int
    ) -> tuple[Tensor, Params]:
        """Sums over tasks, divided by their number."""
        replicas = len(next(iter(params.values())))
        add = lambda value: value.unflatten(0, (replicas, -1)).sum(1) / num_tasks  # noqa: E731
        gradient = self.plan.unflatten(add(lam)) | {name: add(value) for name, value in lam_head.items()}
        gradient |= {name: torch.zeros_like(params[name]) for name in self.chain.silent}
        return add(losses), {name: gradient[name].contiguous() for name in params}

    def _way_through_all(
        self, flat: Tensor, head: Params, rates: Tensor, support: Batch | ClassBatch, query: Batch | ClassBatch
    ) -> tuple[Tensor, Tensor, Params]:
        """Each task's loss, and its gradient with respect to the convolutions and the head."""
        path: list[_Step] = []
        patches = self._prepare(support.x) if self.objective.inner_steps else flat
        for _ in range(self.objective.inner_steps):
            before = flat, head
            flat, head, y, saved = self._inner_step(flat, head, patches, support[1:], rates)
            path.append(_Step(*before, y, saved) if self.keep else _Step(*before))
        y, saved = self.passes.forward(flat, self._prepare(query.x))
        losses, slope, lam_head = self._query(y, head, query[1:])
        lam = self.passes.backward(flat, saved, slope).sum(1)
        del saved
        while path and not self.objective.first_order:
            flat, head, y, saved = path.pop()
            if saved is None or y is None:
                _, _, y, saved = self._inner_step(flat, head, patches, support[1:], rates)
            v = lam * rates
            y_dot, moved = self.passes.forward_tangent(flat, saved, v)
            slope_dot, lam_head = self._curve(y, head, support[1:], y_dot, lam_head)
            parts = self.passes.backward_tangent(flat, saved, v, moved, slope_dot)
            lam = self.passes.descend(lam, parts, None)
        return losses, lam, lam_head

    def _way_through_head(
        self, flat: Tensor, head: Params, rates: Tensor, support: Batch | ClassBatch, query: Batch | ClassBatch
    ) -> tuple[Tensor, Tensor, Params]:
        """The same where only the head moves: the convolutions see each image once, whatever the number of steps.

        A slope at their output goes back through them linearly, so those of all adjoint steps go as their sum.
        """
        y, saved = self.passes.forward(flat, self._prepare(support.x))
        path: list[Params] = []
        for _ in range(self.objective.inner_steps):
            path.append(head)
            head = self._step(y, head, support[1:])[1]
        y_query, saved_query = self.passes.forward(flat, self._prepare(query.x))
        losses, slope, lam_head = self._query(y_query, head, query[1:])
        lam = self.passes.backward(flat, saved_query, slope).sum(1)
        if not self.objective.first_order:
            still, total = torch.zeros_like(y), torch.zeros_like(y)
            while path:
                slope, lam_head = self._curve(y, path.pop(), support[1:], still, lam_head)
                total += slope
            lam = self.passes.descend(lam, self.passes.backward(flat, saved, total), None)
        return losses, lam, lam_head

    @torch.no_grad()
    def adapted(self, params: Params, data: Batch | ClassBatch, steps: Sequence[int]) -> dict[int, Params]:
        """The parameters after each of these numbers of inner steps on data with replicas in front."""
        with sdpa_kernel(SDPBackend.MATH):
            return self._adapted(params, data, steps)

    def _adapted(self, params: Params, data: Batch | ClassBatch, steps: Sequence[int]) -> dict[int, Params]:
        flat = self.plan.flatten(params)
        head = {name: params[name] for name in self.chain.head_names}
        rates = self._rates(params)
        patches = self._prepare(data.x)
        still = {name: params[name] for name in self.chain.silent}
        seen = None if self._body_moves else self.passes.forward(flat, patches)[0]
        found: dict[int, Params] = {}
        for s in range(max(steps) + 1):
            if s in steps:
                found[s] = self.plan.unflatten(flat) | head | still
            if s < max(steps) and seen is not None:
                head = self._step(seen, head, data[1:])[1]
            elif s < max(steps):
                flat, head, _, _ = self._inner_step(flat, head, patches, data[1:], rates)
        return found

    def _inner_step(
        self, flat: Tensor, head: Params, patches: Tensor, target: Any, rates: Tensor
    ) -> tuple[Tensor, Params, Tensor, Any]:
        """Parameters after an inner step, and what its passes left behind."""
        out, saved = self.passes.forward(flat, patches)
        slope, after = self._step(out, head, target)
        parts = self.passes.backward(flat, saved, slope)
        return self.passes.descend(flat, parts, rates), after, out, saved

    def _prepare_images(self, x: Tensor) -> Tensor:
        return self.plan.patches(vmap(self.chain.network.preprocess)(x))

    def _rate(self, name: str) -> float | Tensor:
        return self.objective.rate(name) if name in self._moving else 0.0

    def _rates(self, params: Params) -> Tensor:
        """The step sizes of the flat parameters, (1, total); tensors are looked at anew each time."""
        if self._flat_rates is not None:
            return self._flat_rates
        found = {name: torch.ones_like(value[:1]) * self._rate(name) for name, value in params.items()}
        flat = self.plan.flatten(found)
        if not any(isinstance(self._rate(name), Tensor) for name in params):
            self._flat_rates = flat
        return flat

    def _loss(self, y: Tensor, head: Params, target: Any) -> Tensor:
        return self.chain.head_loss(y, head, target, self.plan.sizes[-1])

    def _head_gradient(self, y: Tensor, head: Params, target: Any) -> tuple[Tensor, Tensor, Params]:
        """Each task's loss and its gradient with respect to the last convolution's output and the head."""
        (slope, gradient), losses = vmap(grad_and_value(self._loss, argnums=(0, 1)))(y, head, target)
        return losses, slope, gradient

    def _head_step(self, y: Tensor, head: Params, target: Any) -> tuple[Tensor, Params]:
        """The slope at the output, and the head after an inner step."""
        slope, gradient = vmap(grad(self._loss, argnums=(0, 1)))(y, head, target)
        return slope, {name: value - self._rate(name) * gradient[name] for name, value in head.items()}

    def _head_curve(self, y: Tensor, head: Params, target: Any, y_dot: Tensor, lam: Params) -> tuple[Tensor, Params]:
        """The tangent of the slope, and the adjoint step of the head: the gradient of <gradient, direction>."""

        def along(y: Tensor, head: Params, target: Any, y_dot: Tensor, lam: Params) -> Tensor:
            slope, gradient = grad(self._loss, argnums=(0, 1))(y, head, target)
            products = [(gradient[n] * lam[n]).sum() * self._rate(n) for n in gradient if n in self._moving]
            return torch.stack([(slope * y_dot).sum(), *products]).sum()

        slope_dot, change = vmap(grad(along, argnums=(0, 1)))(y, head, target, y_dot, lam)
        return slope_dot, {name: lam[name] - change[name] for name in lam}


class _Step(NamedTuple):
    """Where an inner step was taken from, and what its passes left behind, if that is kept."""

    flat: Tensor
    head: Params
    y: Tensor | None = None
    saved: Any = None
