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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.compiled import compile_whole, compiling
from metaleader.inner import Params, moving_names
from metaleader.layers import BatchNorm, Conv2d
from metaleader.network import Network
from metaleader.objective import LOG_LR, Objective, learned_rates, without_rates
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
        # As a convolution gives them: a user's `view` takes no other.
        images = y.view(-1, *size, y.shape[-1]).permute(0, 3, 1, 2).contiguous()
        state = params | {f"{name}.classes": target[1] for name in self.network.choosers if len(target) > 1}
        return self.network.mean_loss(functional_call(self.head, state, (images,)), target[0])


def find_chain(network: Network) -> Chain | None:
    """Divide a network whose images go through a plain convolution, batch norm and ReLU first, however it is written.

    Its forward is traced with torch.fx as far as it holds convolutions; what cannot be traced is no chain.
    """
    module = network.module
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if network.has_dropout or len(names) != len(dict(module.named_parameters())):
        return None
    graph = _trace(module)
    layers: list[Layer] = []
    silent: list[str] = []
    norm: tuple[str, BatchNorm] | None = None
    last: fx.Node | None = None
    node = _only_input(graph) if graph is not None else None
    while node is not None and (block := _block_after(node, module)) is not None:
        last, (name, conv), (norm_name, after), node = block
        filters, channels, kernel, _ = conv.weight.shape
        before = (norm[0], norm[1].eps) if norm else (None, 0.0)
        layers.append(Layer(f"{name}.weight", *before, channels, filters, kernel, conv.stride[0], conv.padding[0]))
        silent += [f"{name}.bias"] if conv.bias is not None else []
        norm = norm_name, after
    if last is None or graph is None:
        return None
    return Chain(network, tuple(layers), _rest(module, graph, last), tuple(silent))


class _Tracer(fx.Tracer):
    """Goes into modules that hold convolutions, and no others."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Conv2d) or not any(isinstance(part, Conv2d) for part in m.modules())


def _trace(module: nn.Module) -> fx.Graph | None:
    """The graph of a module's forward; None with hooks, with a layer that is called twice, and where tracing fails."""
    tracer = _Tracer()
    if any(not tracer.is_leaf_module(part, "") and _has_hooks(part) for part in module.modules()):
        return None
    try:
        graph = tracer.trace(module)
    except Exception:  # whatever a user's forward raises when it is shown no numbers
        return None
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    return graph if len(called) == len(set(called)) else None


def _only_input(graph: fx.Graph) -> fx.Node | None:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return inputs[0] if len(inputs) == 1 else None


def _block_after(
    node: fx.Node, module: nn.Module
) -> tuple[fx.Node, tuple[str, Conv2d], tuple[str, BatchNorm], fx.Node] | None:
    """A convolution, batch norm and ReLU that a node's output goes through: its node, the two layers, ReLU's node."""
    path = [node]
    while len(path) < 4:
        users = list(path[-1].users)
        if len(users) != 1 or users[0].args != (path[-1],) or users[0].kwargs.keys() - {"inplace"}:
            return None
        path += users
    parts = [module.get_submodule(str(at.target)) if at.op == "call_module" else None for at in path[1:]]
    conv, norm, relu = parts
    if type(conv) is not Conv2d or type(norm) is not BatchNorm or norm.weight is None or norm.bias is None:
        return None
    if type(relu) is not nn.ReLU and (path[3].op, path[3].target) not in _RELU_CALLS:
        return None
    square = all(len(set(pair)) == 1 for pair in (conv.stride, conv.padding, conv.weight.shape[2:]))
    if not square or any(part is not None and _has_hooks(part) for part in parts):
        return None
    return path[1], (str(path[1].target), conv), (str(path[2].target), norm), path[3]


_RELU_CALLS = {("call_function", F.relu), ("call_function", torch.relu), ("call_method", "relu")}


def _rest(module: nn.Module, graph: fx.Graph, last: fx.Node) -> nn.Module:
    """What a module does with the output of a convolution; parameters keep their names."""
    first = _only_input(graph)
    assert first is not None
    with graph.inserting_after(first):
        given = graph.placeholder("features")
    last.replace_all_uses_with(given)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op != "output" and node is not given:
            graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(module, graph)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


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
        self._fixed_rates: _Rates | None = None
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
        counted = self.objective.inner_steps if self.objective.every_step else 0
        found = path(flat, head, self._rates(params, tasks), support, query)
        return self._collect(params, found, num_tasks * max(counted, 1))

    def _spread_params(self, params: Params, tasks: int) -> tuple[Tensor, Params]:
        """The convolutions' parameters, flat, and the head's, for each task of each replica."""
        # Copies: of one replica, an expanded tensor would stay a view, which kernels cannot read.
        spread = lambda value: value[:, None].expand(-1, tasks, *value.shape[1:]).contiguous().flatten(0, 1)  # noqa: E731
        return spread(self.plan.flatten(params)), {name: spread(params[name]) for name in self.chain.head_names}

    def _collect_tasks(self, params: Params, found: _Found, number: int) -> tuple[Tensor, Params]:
        """Sums over tasks, divided by the number of losses that they add up."""
        replicas = len(next(iter(params.values())))
        add = lambda value: value.unflatten(0, (replicas, -1)).sum(1) / number  # noqa: E731
        named = lambda flat, head: (  # noqa: E731
            self.plan.unflatten(add(flat))
            | {name: add(value) for name, value in head.items()}
            | {name: torch.zeros_like(params[name]) for name in self.chain.silent}
        )
        gradient = named(found.lam, found.lam_head)
        if self.objective.learn_lr:
            along = named(found.along, found.along_head)
            gradient |= {LOG_LR + name: value.flatten(1).sum(1) for name, value in along.items()}
        return add(found.losses), {name: gradient[name].contiguous() for name in params}

    def _way_through_all(
        self, flat: Tensor, head: Params, rates: _Rates, support: Batch | ClassBatch, query: Batch | ClassBatch
    ) -> _Found:
        """Each task's loss, and its gradient with respect to the convolutions and the head."""
        path: list[_Step] = []
        patches = self._prepare(support.x) if self.objective.inner_steps else flat
        for _ in range(self.objective.inner_steps):
            before = flat, head
            flat, head, y, saved = self._inner_step(flat, head, patches, support[1:], rates)
            path.append(_Step(*before, y, saved) if self.keep else _Step(*before))
        asked = self._prepare(query.x)
        losses, lam, lam_head = self._at_query(flat, head, asked, query[1:])
        along, along_head = _zeros(lam, lam_head)
        while path:
            after = flat, head
            flat, head, y, saved = path.pop()
            if self.objective.learn_lr:
                along, along_head = tree_map(_add_product, (along, along_head), after, (flat, head), (lam, lam_head))
            if not self.objective.first_order:
                if saved is None or y is None:
                    _, _, y, saved = self._inner_step(flat, head, patches, support[1:], rates)
                v = lam * rates.flat
                y_dot, moved = self.passes.forward_tangent(flat, saved, v)
                slope_dot, lam_head = self._curve(y, head, support[1:], y_dot, lam_head, rates.head)
                parts = self.passes.backward_tangent(flat, saved, v, moved, slope_dot)
                lam = self.passes.descend(lam, parts, None)
            if self.objective.every_step and path:
                own = self._at_query(flat, head, asked, query[1:])
                losses, lam, lam_head = tree_map(torch.add, (losses, lam, lam_head), own)
        return _Found(losses, lam, lam_head, along, along_head)

    def _at_query(self, flat: Tensor, head: Params, patches: Tensor, target: Any) -> tuple[Tensor, Tensor, Params]:
        """Each task's query loss and its gradient, there and then."""
        y, saved = self.passes.forward(flat, patches)
        losses, slope, gradient = self._query(y, head, target)
        return losses, self.passes.backward(flat, saved, slope).sum(1), gradient

    def _way_through_head(
        self, flat: Tensor, head: Params, rates: _Rates, support: Batch | ClassBatch, query: Batch | ClassBatch
    ) -> _Found:
        """The same where only the head moves: the convolutions see each image once, whatever the number of steps.

        A slope at their output goes back through them linearly, so those of all adjoint steps go as their sum.
        """
        y, saved = self.passes.forward(flat, self._prepare(support.x))
        path: list[Params] = []
        for _ in range(self.objective.inner_steps):
            path.append(head)
            head = self._step(y, head, support[1:], rates.head)[1]
        asked, saved_asked = self.passes.forward(flat, self._prepare(query.x))
        losses, slope, lam_head = self._query(asked, head, query[1:])
        still, curved = torch.zeros_like(y), torch.zeros_like(y)
        along, along_head = _zeros(flat, lam_head)
        while path:
            after, head = head, path.pop()
            if self.objective.learn_lr:
                along_head = tree_map(_add_product, along_head, after, head, lam_head)
            if not self.objective.first_order:
                slope_dot, lam_head = self._curve(y, head, support[1:], still, lam_head, rates.head)
                curved += slope_dot
            if self.objective.every_step and path:
                own = self._query(asked, head, query[1:])
                losses, slope, lam_head = tree_map(torch.add, (losses, slope, lam_head), own)
        lam = self.passes.backward(flat, saved_asked, slope).sum(1)
        if not self.objective.first_order:
            lam = self.passes.descend(lam, self.passes.backward(flat, saved, curved), None)
        return _Found(losses, lam, lam_head, along, along_head)

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
                head = self._step(seen, head, data[1:], rates.head)[1]
            elif s < max(steps):
                flat, head, _, _ = self._inner_step(flat, head, patches, data[1:], rates)
        return found

    def _inner_step(
        self, flat: Tensor, head: Params, patches: Tensor, target: Any, rates: _Rates
    ) -> tuple[Tensor, Params, Tensor, Any]:
        """Parameters after an inner step, and what its passes left behind."""
        out, saved = self.passes.forward(flat, patches)
        slope, after = self._step(out, head, target, rates.head)
        parts = self.passes.backward(flat, saved, slope)
        return self.passes.descend(flat, parts, rates.flat), after, out, saved

    def _prepare_images(self, x: Tensor) -> Tensor:
        return self.plan.patches(vmap(self.chain.network.preprocess)(x))

    def _rate(self, name: str, learned: Params) -> float | Tensor:
        return 0.0 if name not in self._moving else learned.get(name, self.objective.rate(name))

    def _rates(self, params: Params, tasks: int = 1) -> _Rates:
        """The step sizes; tensors are looked at anew each time."""
        if self._fixed_rates is not None:
            return self._fixed_rates
        learned = {name: rate.repeat_interleave(tasks, 0) for name, rate in learned_rates(params).items()}
        rows = len(next(iter(learned.values()))) if learned else 1

        def of_tensor(name: str, value: Tensor) -> Tensor:
            rate = self._rate(name, learned)
            if isinstance(rate, Tensor):
                return rate.reshape(-1, *[1] * (value.ndim - 1)).expand(rows, *value.shape[1:])
            return value.new_full((rows, *value.shape[1:]), rate)

        own = without_rates(params)
        flat = self.plan.flatten({name: of_tensor(name, value) for name, value in own.items()})
        rates = _Rates(flat, {name: rate for name, rate in learned.items() if name in self.chain.head_names})
        if not any(isinstance(self._rate(name, learned), Tensor) for name in own):
            self._fixed_rates = rates
        return rates

    def _loss(self, y: Tensor, head: Params, target: Any) -> Tensor:
        return self.chain.head_loss(y, head, target, self.plan.sizes[-1])

    def _head_gradient(self, y: Tensor, head: Params, target: Any) -> tuple[Tensor, Tensor, Params]:
        """Each task's loss and its gradient with respect to the last convolution's output and the head."""
        (slope, gradient), losses = vmap(grad_and_value(self._loss, argnums=(0, 1)))(y, head, target)
        return losses, slope, gradient

    def _head_step(self, y: Tensor, head: Params, target: Any, rates: Params) -> tuple[Tensor, Params]:
        """The slope at the output, and the head after an inner step."""

        def one(y: Tensor, head: Params, target: Any, rates: Params) -> tuple[Tensor, Params]:
            slope, gradient = grad(self._loss, argnums=(0, 1))(y, head, target)
            return slope, {name: value - self._rate(name, rates) * gradient[name] for name, value in head.items()}

        return vmap(one)(y, head, target, rates)

    def _head_curve(
        self, y: Tensor, head: Params, target: Any, y_dot: Tensor, lam: Params, rates: Params
    ) -> tuple[Tensor, Params]:
        """The tangent of the slope, and the adjoint step of the head: the gradient of <gradient, direction>."""

        def along(y: Tensor, head: Params, target: Any, y_dot: Tensor, lam: Params, rates: Params) -> Tensor:
            slope, gradient = grad(self._loss, argnums=(0, 1))(y, head, target)
            products = [(gradient[n] * lam[n]).sum() * self._rate(n, rates) for n in gradient if n in self._moving]
            return torch.stack([(slope * y_dot).sum(), *products]).sum()

        slope_dot, change = vmap(grad(along, argnums=(0, 1)))(y, head, target, y_dot, lam, rates)
        return slope_dot, {name: lam[name] - change[name] for name in lam}


class _Rates(NamedTuple):
    """Step sizes: of the flat parameters, (1 or tasks, total), and where they are learned, of the head's, (tasks,)."""

    flat: Tensor
    head: Params


class _Found(NamedTuple):
    """Of each task: the loss, its gradient, and, where step sizes are learned, the products of moves and lambdas.

    With a step size exp(l), the derivative with respect to l is the sum over inner steps of
    <theta_{s+1} - theta_s, lambda_{s+1}> over the tensor that it moves.
    """

    losses: Tensor
    lam: Tensor
    lam_head: Params
    along: Tensor
    along_head: Params


def _add_product(total: Tensor, after: Tensor, before: Tensor, lam: Tensor) -> Tensor:
    return total + (after - before) * lam


def _zeros(flat: Tensor, head: Params) -> tuple[Tensor, Params]:
    return torch.zeros_like(flat), {name: torch.zeros_like(value) for name, value in head.items()}


class _Step(NamedTuple):
    """Where an inner step was taken from, and what its passes left behind, if that is kept."""

    flat: Tensor
    head: Params
    y: Tensor | None = None
    saved: Any = None
