"""All layers of torch.nn in a learner: whether each works, in every engine mode, or why it is refused.

A layer stands between two linear layers. It works if the meta-gradient of that net equals float64 autograd through the
unmodified layer, one task at a time, and an adapted net's `state_dict` loads into the original. Outcomes are published:

    PYTHONPATH=.:tests python tests/nets/conformance.py eager|traced|compiled|captured [--out FILE] [NAME...]
    PYTHONPATH=.:tests python tests/nets/conformance.py page [FILE...]

The first command prints outcomes and writes them into FILE; the second merges such files into docs/results/layers.csv
and writes docs/layers.md.
"""

import copy
import csv
import functools
import io
import os
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import oracles
import torch
from oracles import normal
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from metaleader import losses
from metaleader.engine import compiled
from metaleader.engine.engine import Engine
from metaleader.engine.objective import Objective
from metaleader.gradient.meta import Inner, meta_gradient
from metaleader.nets.functional import Network
from metaleader.tasks import Batch

ROOT = Path(__file__).parents[2]
TABLE, PAGE = ROOT / "docs" / "results" / "layers.csv", ROOT / "docs" / "layers.md"
MODES = ("eager", "traced", "compiled", "captured")
WORKS = "works"

Call = Callable[[Any, Tensor], Tensor]


traced_only = functools.partial(torch.compile, dynamic=False, fullgraph=True, backend="aot_eager_decomp_partition")


class Case(NamedTuple):
    """A layer and how it is called.

    Attributes:
        make: builds the layer.
        shape: of a row of its input; None for a row of integers.
        call: of (layer, input), where it is not `layer(input)`.
        equal: a function of (layer, input) equal to a layer that torch cannot differentiate twice.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] | None
    call: Call | None = None
    equal: Call | None = None


class Calls(nn.Module):
    """A layer that is called in a way of its own."""

    def __init__(self, layer: nn.Module, call: Call) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


ROW, LINE, IMAGE, VOLUME = (6,), (4, 6), (4, 4, 4), (4, 2, 4, 4)
BY_DIMENSION = {1: LINE, 2: IMAGE, 3: VOLUME}


def unpooled(layer: nn.Module, x: Tensor) -> Tensor:
    pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[x.ndim - 2]
    pooled, indices = pool(x, 2, return_indices=True)
    return layer(pooled, indices)


def summed(layer: nn.Module, x: Tensor) -> Tensor:
    output, states = layer(x)
    return output.flatten(1).sum(1, keepdim=True) * torch.stack([state.sum() for state in states]).sum() + output[:, 0]


def mean_of_bags(layer: Any, x: Tensor) -> Tensor:
    """`nn.EmbeddingBag`, bag by bag."""
    bags = [[layer.weight[int(i)] for i in row if i != layer.padding_idx] for row in x]
    zero = torch.zeros_like(layer.weight[0])
    return torch.stack([torch.stack(bag).mean(0) if bag else zero for bag in bags])


def sum_of_bags(layer: Any, x: Tensor) -> Tensor:
    return torch.stack([torch.stack([layer.weight[int(i)] for i in row]).sum(0) for row in x])


def weighted_bags(layer: Any, x: Tensor) -> Tensor:
    layer = layer.bag
    weights = torch.where(x == layer.padding_idx, 0.0, bag_weights(x))
    return torch.stack([w @ layer.weight[row] for w, row in zip(weights, x, strict=True)])


def largest_of_bags(layer: Any, x: Tensor) -> Tensor:
    return torch.stack([layer.weight[row].max(0).values for row in x])


def bag_weights(x: Tensor) -> Tensor:
    return torch.linspace(0.1, 1, x.shape[1], dtype=torch.float64).expand(x.shape)


ACTIVATIONS = [
    nn.CELU, nn.ELU, nn.GELU, nn.GLU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.RReLU, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus,
    nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink,
]  # fmt: skip
CASES: dict[str, Case] = {kind.__name__: Case(kind, ROW) for kind in ACTIVATIONS}
for d, place in BY_DIMENSION.items():
    CASES |= {
        f"AdaptiveAvgPool{d}d": Case(functools.partial(getattr(nn, f"AdaptiveAvgPool{d}d"), 2), place),
        f"AdaptiveMaxPool{d}d": Case(functools.partial(getattr(nn, f"AdaptiveMaxPool{d}d"), 2), place),
        f"AvgPool{d}d": Case(functools.partial(getattr(nn, f"AvgPool{d}d"), 2), place),
        f"BatchNorm{d}d": Case(functools.partial(getattr(nn, f"BatchNorm{d}d"), 4), place),
        f"CircularPad{d}d": Case(functools.partial(getattr(nn, f"CircularPad{d}d"), 1), place),
        f"ConstantPad{d}d": Case(functools.partial(getattr(nn, f"ConstantPad{d}d"), 1, 0.5), place),
        f"Conv{d}d": Case(functools.partial(getattr(nn, f"Conv{d}d"), 4, 2, 2, stride=2, padding=1), place),
        f"ConvTranspose{d}d": Case(functools.partial(getattr(nn, f"ConvTranspose{d}d"), 4, 2, 2, stride=2), place),
        f"Dropout{d}d": Case(functools.partial(getattr(nn, f"Dropout{d}d"), 0.3), place),
        f"InstanceNorm{d}d": Case(functools.partial(getattr(nn, f"InstanceNorm{d}d"), 4, affine=True), place),
        f"LPPool{d}d": Case(functools.partial(getattr(nn, f"LPPool{d}d"), 3, 2), place, lambda m, x: m(x.abs() + 0.1)),
        f"LazyBatchNorm{d}d": Case(getattr(nn, f"LazyBatchNorm{d}d"), place),
        f"LazyConv{d}d": Case(functools.partial(getattr(nn, f"LazyConv{d}d"), 2, 2), place),
        f"LazyConvTranspose{d}d": Case(functools.partial(getattr(nn, f"LazyConvTranspose{d}d"), 2, 2), place),
        f"LazyInstanceNorm{d}d": Case(
            functools.partial(getattr(nn, f"LazyInstanceNorm{d}d"), track_running_stats=False), place
        ),
        f"MaxPool{d}d": Case(functools.partial(getattr(nn, f"MaxPool{d}d"), 2), place),
        f"MaxUnpool{d}d": Case(functools.partial(getattr(nn, f"MaxUnpool{d}d"), 2), place, unpooled),
        f"ReflectionPad{d}d": Case(functools.partial(getattr(nn, f"ReflectionPad{d}d"), 1), place),
        f"ReplicationPad{d}d": Case(functools.partial(getattr(nn, f"ReplicationPad{d}d"), 1), place),
        f"ZeroPad{d}d": Case(functools.partial(getattr(nn, f"ZeroPad{d}d"), 1), place),
    }
CASES |= {
    "AlphaDropout": Case(nn.AlphaDropout, ROW),
    "Bilinear": Case(lambda: nn.Bilinear(6, 6, 3), ROW, lambda m, x: m(x, x.square())),
    "ChannelShuffle": Case(lambda: nn.ChannelShuffle(2), IMAGE),
    "CosineSimilarity": Case(nn.CosineSimilarity, ROW, lambda m, x: m(x[:, None, :3], x[:, None, 3:])),
    "CrossMapLRN2d": Case(lambda: nn.CrossMapLRN2d(3), IMAGE),
    "Dropout": Case(lambda: nn.Dropout(0.3), ROW),
    "Embedding": Case(lambda: nn.Embedding(7, 4, padding_idx=1), None),
    "EmbeddingBag": Case(lambda: nn.EmbeddingBag(7, 4, padding_idx=1), None, equal=mean_of_bags),
    "FeatureAlphaDropout": Case(nn.FeatureAlphaDropout, IMAGE),
    "Flatten": Case(nn.Flatten, IMAGE),
    "Fold": Case(lambda: nn.Fold(4, 2, stride=2), (8, 4)),
    "FractionalMaxPool2d": Case(lambda: nn.FractionalMaxPool2d(2, output_size=2), IMAGE),
    "FractionalMaxPool3d": Case(lambda: nn.FractionalMaxPool3d((1, 2, 2), output_size=(1, 2, 2)), VOLUME),
    "GRU": Case(lambda: nn.GRU(4, 3, 2, batch_first=True, bidirectional=True), (3, 4), summed),
    "GRUCell": Case(lambda: nn.GRUCell(6, 3), ROW),
    "GroupNorm": Case(lambda: nn.GroupNorm(2, 4), IMAGE),
    "Hardsigmoid": Case(nn.Hardsigmoid, ROW, equal=lambda _, x: (x / 6 + 0.5).clamp(0, 1)),
    "Identity": Case(nn.Identity, ROW),
    "LSTM": Case(
        lambda: nn.LSTM(4, 3, 2, batch_first=True), (3, 4), lambda m, x: m(x)[0].flatten(1) * m(x)[1][1][:1].sum(-1).mT
    ),
    "LSTMCell": Case(lambda: nn.LSTMCell(6, 3), ROW, lambda m, x: torch.cat(m(x), 1)),
    "LayerNorm": Case(lambda: nn.LayerNorm([4, 4]), IMAGE),
    "LazyLinear": Case(lambda: nn.LazyLinear(3), ROW),
    "Linear": Case(lambda: nn.Linear(6, 3), ROW),
    "LocalResponseNorm": Case(lambda: nn.LocalResponseNorm(3, 0.5), IMAGE),
    "LogSoftmax": Case(lambda: nn.LogSoftmax(1), ROW),
    "MultiheadAttention": Case(
        lambda: nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True), (3, 4), lambda m, x: m(x, x, x)[0]
    ),
    "PairwiseDistance": Case(nn.PairwiseDistance, ROW, lambda m, x: m(x[:, None, :3], x[:, None, 3:])),
    "PixelShuffle": Case(lambda: nn.PixelShuffle(2), IMAGE),
    "PixelUnshuffle": Case(lambda: nn.PixelUnshuffle(2), IMAGE),
    "RMSNorm": Case(lambda: nn.RMSNorm(4), IMAGE),
    "RNN": Case(lambda: nn.RNN(4, 3, batch_first=True), (3, 4), summed),
    "RNNCell": Case(lambda: nn.RNNCell(6, 3), ROW),
    "Softmax": Case(lambda: nn.Softmax(1), ROW),
    "Softmax2d": Case(nn.Softmax2d, IMAGE),
    "Softmin": Case(lambda: nn.Softmin(1), ROW),
    "SyncBatchNorm": Case(lambda: nn.SyncBatchNorm(4), IMAGE),
    "Threshold": Case(lambda: nn.Threshold(0.1, -0.5), ROW),
    "Transformer": Case(
        lambda: nn.Transformer(4, 2, 1, 1, 5, 0.3, batch_first=True), (3, 4), lambda m, x: m(x, x[:, :2])
    ),
    "TransformerDecoder": Case(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 5, 0.3, batch_first=True), 1),
        (3, 4),
        lambda m, x: m(x, x[:, :2]),
    ),
    "TransformerDecoderLayer": Case(
        lambda: nn.TransformerDecoderLayer(4, 2, 5, 0.3, batch_first=True), (3, 4), lambda m, x: m(x, x[:, :2])
    ),
    "TransformerEncoder": Case(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 5, 0.3, batch_first=True), 1, enable_nested_tensor=False
        ),
        (3, 4),
    ),
    "TransformerEncoderLayer": Case(lambda: nn.TransformerEncoderLayer(4, 2, 5, 0.3, batch_first=True), (3, 4)),
    "Unflatten": Case(lambda: nn.Unflatten(1, (2, 3)), ROW),
    "Unfold": Case(lambda: nn.Unfold(2), IMAGE),
    "Upsample": Case(lambda: nn.Upsample(scale_factor=2, mode="bicubic"), IMAGE),
    "UpsamplingBilinear2d": Case(lambda: nn.UpsamplingBilinear2d(scale_factor=2), IMAGE),
    "UpsamplingNearest2d": Case(lambda: nn.UpsamplingNearest2d(scale_factor=2), IMAGE),
}


class WeightedBag(nn.Module):
    """A bag whose numbers have weights."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(*args, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(x, per_sample_weights=bag_weights(x))


# Other settings of a layer, tested with it in eager mode
VARIANTS: dict[str, Case] = {
    **{f"Upsample, {mode}": Case(functools.partial(nn.Upsample, scale_factor=1.5, mode=mode), BY_DIMENSION[d])
       for d, mode in ((1, "nearest"), (1, "linear"), (2, "bilinear"), (3, "trilinear"), (2, "nearest-exact"))},
    **{f"Conv{d}d, groups": Case(
        functools.partial(getattr(nn, f"Conv{d}d"), 4, 4, 3, groups=2, dilation=2, padding="same",
                          padding_mode="circular"), BY_DIMENSION[d]) for d in (1, 2)},
    "ConvTranspose2d, groups": Case(
        lambda: nn.ConvTranspose2d(4, 2, 3, groups=2, dilation=2, padding=1, output_padding=1, stride=2), IMAGE),
    "MaxPool2d, dilated": Case(lambda: nn.MaxPool2d(2, 1, padding=1, dilation=2, ceil_mode=True), IMAGE),
    "AvgPool2d, padded": Case(lambda: nn.AvgPool2d(3, 2, padding=1, ceil_mode=True, count_include_pad=False), IMAGE),
    "EmbeddingBag, sum": Case(lambda: nn.EmbeddingBag(7, 4, mode="sum"), None, equal=sum_of_bags),
    "EmbeddingBag, max": Case(lambda: nn.EmbeddingBag(7, 4, mode="max"), None, equal=largest_of_bags),
    "EmbeddingBag, weights": Case(lambda: WeightedBag(7, 4, mode="sum", padding_idx=0), None, equal=weighted_bags),
    "Embedding, sparse": Case(lambda: nn.Embedding(7, 4, sparse=True), None, equal=lambda m, x: m.weight[x]),
    "PReLU, channels": Case(lambda: nn.PReLU(4), IMAGE),
    "Softplus, beta": Case(lambda: nn.Softplus(2.0, 1.0), ROW),
    "GELU, tanh": Case(lambda: nn.GELU("tanh"), ROW),
    "ParameterDict": Case(
        lambda: nn.ParameterDict({"a": torch.ones(6), "b": torch.ones(6)}), ROW, lambda m, x: x * m["a"] + m["b"]),
    "ParameterList": Case(lambda: nn.ParameterList([torch.ones(6)]), ROW, lambda m, x: x * m[0]),
    "ModuleDict": Case(lambda: nn.ModuleDict({"a": nn.Tanh()}), ROW, lambda m, x: m["a"](x)),
    "ModuleList": Case(lambda: nn.ModuleList([nn.Linear(6, 2)]), ROW, lambda m, x: m[0](x)),
}  # fmt: skip
CONTAINERS = {"Container", "Module", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "Sequential",
              "RNNBase", "RNNCellBase"}  # fmt: skip


def others() -> set[str]:
    """Names of torch.nn that are containers, base classes or losses."""
    names = set(nn.modules.__all__) - set(CASES)
    of_loss = {name for name in names if "Loss" in name or name == "LinearCrossEntropyOptions"}
    return CONTAINERS | of_loss


def build(case: Case) -> nn.Module:
    """The layer between two linear layers, or behind an input of integers, in float64."""
    torch.manual_seed(0)
    layer = case.make()
    layer = layer if case.call is None else Calls(layer, case.call)
    first = [nn.Identity()] if case.shape is None else [
        nn.Linear(5, torch.Size(case.shape).numel()), nn.Unflatten(1, case.shape)
    ]  # fmt: skip
    body = nn.Sequential(*first, layer, nn.Flatten()).double()
    with torch.no_grad():
        size = body.eval()(inputs(case, "size", 3))[0].numel()
    module = nn.Sequential(*body, nn.Linear(size, 2)).double()
    with torch.no_grad():
        for value in module.parameters():
            value.add_(0.2 * torch.randn_like(value))
    return module


def inputs(case: Case, purpose: str, *shape: int) -> Tensor:
    return oracles.labels(purpose, 7, *shape, 4) if case.shape is None else normal(purpose, *shape, 5)


def batches(case: Case, *leading: int) -> list[Batch]:
    return [Batch(inputs(case, f"x{i}", *leading, 3), oracles.labels(f"y{i}", 2, *leading, 3)) for i in range(2)]


def outcome(case: Case, mode: str, device: str = "cpu") -> str:
    """What became of a layer: that it works, that it is refused and why, or what failed."""
    module = build(case)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="batch norm layers")
            network = Network(module, losses.cross_entropy, device=torch.device(device))
    except ValueError as error:
        reason = str(error).partition(") ")[2] or str(error)
        return f"refused: {reason}"
    noise = torch.arange(100, 106).view(3, 2) if network.has_dropout else None
    return run(case, module, network, noise, mode, device) if mode != "eager" else eager(case, module, network, noise)


def slow_gradient(case: Case, module: Any, network: Network, batches: list[Batch], noise: Tensor | None) -> Any:
    """By autograd through the unmodified layer, or through one equal to it."""
    support, query = batches
    if case.equal is not None:
        equal = copy.deepcopy(module)
        layer = equal[1 if case.shape is None else 2]
        layer.forward = types.MethodType(case.equal, layer)
        for net in (module, equal):
            net.zero_grad()
            F.cross_entropy(net(query.x[0]), query.y[0]).backward()
        slopes = [{name: value.grad.to_dense() for name, value in net.named_parameters()} for net in (module, equal)]
        # torch's Hardsigmoid multiplies by 1/6 in float32.
        oracles.assert_close(slopes[0], slopes[1], 1e-7)
        module = equal
    params = {name: value.cpu() for name, value in network.params().items()}
    loss_fn = oracles.module_loss(module, F.cross_entropy)
    return oracles.unrolled(loss_fn, params, support, query, 0.1, 2, noise=noise)[:2]


def eager(case: Case, module: nn.Module, network: Network, noise: Tensor | None) -> str:
    support, query = batches(case, 2)
    network.check(network.params(), Batch(*(part[0] for part in support)), "observe")
    found = meta_gradient(network.loss_fn, network.params(), support, query, 0.1, 2, noise=noise)
    oracles.assert_close(found, slow_gradient(case, module, network, [support, query], noise))
    net = network.adapted(network.params(), Batch(*(part[0] for part in support)))
    build(case).load_state_dict(net.state_dict(), strict=True)
    assert bool(torch.isfinite(net(support.x[0])).all())
    return WORKS


def run(case: Case, module: nn.Module, network: Network, noise: Tensor | None, mode: str, device: str) -> str:
    """The outcome of a compiled or captured mode; "traced" is compiled without generating code."""
    support, query = batches(case, 2)
    engine = Engine("captured" if mode == "captured" else "compiled", device=torch.device(device))
    asked = engine.mode
    own_support, own_query = tree_map(lambda leaf: leaf[None].to(device), (support, query))
    own_noise = None if noise is None else noise[None].to(device)
    objective = Objective(network, Inner(0.1, 2))
    flat = objective.layout.flat(network.params())[None]
    _, gradients = engine.gradient(objective, flat, own_support, own_query, own_noise)
    found = {name: value[0].cpu() for name, value in objective.layout.named(gradients).items()}
    oracles.assert_close(found, slow_gradient(case, module, network, [support, query], noise)[1], 1e-8)
    return WORKS if engine.mode == asked else f"works in mode {engine.mode}: it does not compile"


def run_all(mode: str, names: Iterable[str], out: Path | None, device: str) -> dict[str, str]:
    """Outcomes by name; the file is written after each."""
    outcomes: dict[str, str] = {}
    for name in names:
        start = time.perf_counter()
        try:
            outcomes[name] = outcome(CASES[name], mode, device)
        except Exception as error:
            outcomes[name] = f"FAILS: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
        torch.compiler.reset()
        print(f"{name}: {outcomes[name]} ({time.perf_counter() - start:.1f} s)", flush=True)
        if out is not None:
            out.write_text(text_of({name: {"layer": name, mode: value} for name, value in outcomes.items()}, mode))
    return outcomes


def text_of(rows: dict[str, dict[str, str]], *modes: str) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["layer", *modes], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[name] for name in sorted(rows, key=str.lower))
    return text.getvalue()


def published() -> dict[str, dict[str, str]]:
    """The outcomes in docs/results/layers.csv, by name."""
    with TABLE.open(newline="") as file:
        return {row["layer"]: row for row in csv.DictReader(file)}


HEAD = """# Layers of torch.nn

A learner takes any network whose layers are in this table. "works" means that the meta-gradient of a small network with
the layer between two linear layers (2 tasks, 2 inner steps, float64) equals autograd through the unmodified layer, one
task at a time, with the same dropout masks. All other layers are refused with the reason given.

| column | meaning | measured |
|---|---|---|
| eager | `engine="eager"` | CPU, torch 2.13.0; compared again by `make test` |
| traced | `engine="compiled"`, traced as a whole and run, but no code generated | CPU; empty: not measured |
| compiled | `engine="compiled"` | CPU; empty: not measured |
| captured | `engine="captured"` | one NVIDIA H200; empty: not measured |

{works} of {total} layers with a differentiable forward work in eager mode, and {traced} of {tried} are traced as
a whole. A network that does not compile runs as a CUDA graph or eagerly, with a line in the log. Lazy layers
work after a call on one batch. Containers (`Sequential`, `ModuleList`, `ParameterDict` and others) work;
losses are not layers: see [Use your own network](howto/network.md#losses).

| layer | eager | traced | compiled | captured |
|---|---|---|---|---|
"""
TAIL = """
The table is generated by `PYTHONPATH=.:tests python tests/nets/conformance.py page` from outcomes in
`docs/results/layers.csv`; a test compares it.
"""


def page() -> str:
    """The text of docs/layers.md."""
    rows = published()
    works = {mode: sum(row[mode] == WORKS for row in rows.values()) for mode in MODES}
    tried = sum(bool(row["traced"]) and not row["traced"].startswith("refused") for row in rows.values())
    text = HEAD.format(works=works["eager"], total=len(rows), traced=works["traced"], tried=tried)
    for name, row in rows.items():
        cells = [row[mode] for mode in MODES]
        if cells[0].startswith("refused"):
            cells[1:] = [""] * 3
        text += f"| {name} | " + " | ".join(cells) + " |\n"
    return text + TAIL


def publish(files: Iterable[Path]) -> None:
    """Merge outcomes into the table, and write the page."""
    rows = published() if TABLE.exists() else {}
    rows = {name: dict.fromkeys(["layer", *MODES], "") | {"layer": name} | rows.get(name, {}) for name in CASES}
    for path in files:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                rows[row["layer"]] |= row
    TABLE.write_text(text_of(rows, *MODES))
    PAGE.write_text(page())


def main(arguments: list[str]) -> None:
    command, *rest = arguments
    if command == "page":
        publish(Path(name) for name in rest)
        return
    out = Path(rest[1]) if rest[:1] == ["--out"] else None
    names = rest[2:] if out else rest
    if command == "traced":
        compiled.compile_whole = traced_only
    device = "cuda" if command == "captured" else "cpu"
    run_all(command, names or CASES, out, os.environ.get("METALEADER_TEST_DEVICE", device))


if __name__ == "__main__":
    main(sys.argv[1:])
