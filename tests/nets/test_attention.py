"""Attention against torch's own, with the same dropout masks."""

from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from oracles import assert_close, normal
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from metaleader import losses
from metaleader.gradient.meta import adapt, meta_gradient
from metaleader.nets.functional import Network
from metaleader.tasks import Batch

TOKENS, WIDTH = 3, 4


class Attends(nn.Module):
    """A net with a function of its tokens, (rows, tokens, width)."""

    def __init__(self, layer: nn.Module, function: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layer, self.function = layer, function
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head((self.layer(x) if self.function is None else self.function(self.layer, x)).mean(1))


def multihead(first: bool = True, keys: int = TOKENS, **call: Any) -> Callable[[Any, Tensor], Tensor]:
    """Self-attention, or with `keys` attention to the first tokens; the weights are part of the output."""

    def function(layer: Any, x: Tensor) -> Tensor:
        x = x if first else x.transpose(0, 1)
        y = x if keys == TOKENS else x[:, :keys]
        options = {name: value(x) if callable(value) else value for name, value in call.items()}
        out, weights = layer(x, y, y, **options)
        out = out if first else out.transpose(0, 1)
        return out if weights is None else out + weights.square().flatten(2).sum((1, 2), keepdim=True)

    return function


def attention(**options: Any) -> nn.Module:
    return nn.MultiheadAttention(WIDTH, 2, **{"batch_first": True, **options})


def encoder(dropout: float = 0.0, **options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 5, dropout, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def grouped(queries: Tensor, keys: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(queries, keys, keys, enable_gqa=True).mean(1)


CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False, False, True], [False, True, True], [False, False, False]])
padding: Callable[[Tensor], Tensor] = lambda x: PADDING[: len(x)]  # noqa: E731
ADDED = normal("added", TOKENS, TOKENS)
FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sdpa": lambda _, x: F.scaled_dot_product_attention(x, x + 1, x.square()),
    "sdpa, causal, scale": lambda _, x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3),
    "sdpa, bool mask": lambda _, x: F.scaled_dot_product_attention(x, x, x, ~CAUSAL),
    "sdpa, mask with an empty row": lambda _, x: F.scaled_dot_product_attention(x, x, x, CAUSAL),
    "sdpa, added mask": lambda _, x: F.scaled_dot_product_attention(x, x, x, ADDED),
    "sdpa, groups": lambda _, x: grouped(x[:, None].expand(-1, 4, -1, -1), x[:, None].expand(-1, 2, -1, -1)),
}
CASES: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda function=function: Attends(nn.Identity(), function) for name, function in FUNCTIONS.items()},
    "multihead": lambda: Attends(attention(), multihead()),
    "multihead, positions first": lambda: Attends(attention(batch_first=False), multihead(False)),
    "multihead, no weights": lambda: Attends(attention(), multihead(need_weights=False)),
    "multihead, weights of each head": lambda: Attends(attention(), multihead(average_attn_weights=False)),
    "multihead, no bias": lambda: Attends(attention(bias=False), multihead()),
    "multihead, keys of their own": lambda: Attends(attention(), multihead(keys=2)),
    "multihead, appended keys": lambda: Attends(
        attention(add_bias_kv=True, add_zero_attn=True), multihead(attn_mask=CAUSAL, key_padding_mask=padding)
    ),
    "multihead, widths": lambda: Attends(
        attention(kdim=2, vdim=3), lambda layer, x: layer(x, x[..., :2], x[..., :3])[0]
    ),
    "multihead, causal": lambda: Attends(
        attention(), multihead(attn_mask=CAUSAL, is_causal=True, need_weights=False)
    ),
    "multihead, added mask for each head": lambda: Attends(
        attention(), multihead(attn_mask=lambda x: normal("heads", 6, TOKENS, TOKENS)[: 2 * len(x)])
    ),
    "multihead, one row at a time": lambda: Attends(
        attention(), lambda layer, x: torch.stack([layer(row, row, row, key_padding_mask=PADDING[1])[0] for row in x])
    ),
    "F.multi_head_attention_forward": lambda: Attends(
        attention(),
        lambda layer, x: F.multi_head_attention_forward(
            x, x, x, WIDTH, 2, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0,
            layer.out_proj.weight, layer.out_proj.bias,
        )[0],
    ),
    "encoder": lambda: Attends(encoder()),
    "encoder, mask": lambda: Attends(encoder(), lambda layer, x: layer(x, CAUSAL, padding(x))),
    "encoder, norm first": lambda: Attends(encoder(activation="gelu", norm_first=True)),
    "decoder": lambda: Attends(
        nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 5, 0.0, batch_first=True), 2, nn.LayerNorm(WIDTH)),
        lambda layer, x: layer(x, x[:, :2], tgt_mask=CAUSAL),
    ),
    "transformer": lambda: Attends(
        nn.Transformer(WIDTH, 2, 1, 1, 5, 0.0, batch_first=True), lambda layer, x: layer(x, x[:, :2])
    ),
}  # fmt: skip
DROPOUT: dict[str, Callable[[], nn.Module]] = {
    "multihead": lambda: Attends(attention(dropout=0.3), multihead()),
    "multihead, no weights": lambda: Attends(attention(dropout=0.3), multihead(need_weights=False)),
    "encoder": lambda: Attends(encoder(0.3), lambda layer, x: layer(x, CAUSAL)),
    "decoder": lambda: Attends(
        nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 5, 0.3, batch_first=True), 2),
        lambda layer, x: layer(x, x[:, :2]),
    ),
}


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    module = make().double()
    with torch.no_grad():
        for value in module.parameters():
            value.add_(0.3 * torch.randn_like(value))
    return module


def data() -> list[Batch]:
    return [Batch(normal(f"x{i}", 2, 3, TOKENS, WIDTH), oracles.labels(f"y{i}", 2, 2, 3)) for i in range(2)]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_the_value_and_the_meta_gradient_are_those_of_torch(make: Callable[[], nn.Module]):
    module = build(make)
    network = Network(module, losses.cross_entropy)
    support, query = data()
    network.check(network.params(), Batch(*(part[0] for part in support)), "observe")
    assert_close(network.predict(network.params(), query.x[0]), module.train()(query.x[0]).detach(), 1e-12)
    loss_fn = oracles.module_loss(module, F.cross_entropy)
    expected = oracles.unrolled(loss_fn, network.params(), support, query, 0.3, 2)[:2]
    assert_close(meta_gradient(network.loss_fn, network.params(), support, query, 0.3, 2), expected)


@pytest.mark.parametrize("make", DROPOUT.values(), ids=DROPOUT.keys())
def test_dropout_masks_of_attention_are_replayed(make: Callable[[], nn.Module]):
    module = build(make)
    network = Network(module, losses.cross_entropy)
    assert network.has_dropout
    support, query = data()
    noise = torch.arange(100, 106).view(3, 2)
    expected = oracles.unrolled(
        oracles.module_loss(module, F.cross_entropy), network.params(), support, query, 0.3, 2, noise=noise
    )[:2]
    assert_close(meta_gradient(network.loss_fn, network.params(), support, query, 0.3, 2, noise=noise), expected)
    without = meta_gradient(network.loss_fn, network.params(), support, query, 0.3, 2)
    assert not torch.allclose(without[0], expected[0], 1e-3)


@pytest.mark.parametrize("make", [CASES["encoder, mask"], *DROPOUT.values()])
def test_adapted_nets_are_torchs_layers_on_the_fast_path_too(make: Callable[[], nn.Module]):
    module = build(make)
    network = Network(module, losses.cross_entropy)
    batch = Batch(*(part[0] for part in data()[0]))
    noise = torch.arange(2) if network.has_dropout else None
    params = adapt(network.loss_fn, network.params(), batch, 0.5, 2, noise=noise)
    net = network.adapted(params, batch).train(False)
    module.load_state_dict(net.state_dict(), strict=True)
    expected = module.eval()(batch.x).detach()
    assert_close(network.predict(params, batch.x).detach(), expected, 1e-12)
    assert_close(net(batch.x).detach(), expected, 1e-12)
    with torch.no_grad():
        assert_close(net(batch.x), expected, 1e-12)
    assert not any(type(part).__module__ == "metaleader.nets.attention" for part in net.modules())


def test_a_transformer_of_torchs_layers_runs_no_code_of_its_own():
    network = Network(nn.Sequential(encoder(0.1), nn.Linear(WIDTH, 2)), losses.cross_entropy)
    assert not network.own_code


def test_attention_batched_over_tasks_does_not_warn():
    network = Network(build(CASES["sdpa"]), losses.cross_entropy)
    x = normal("x", 2, 3, TOKENS, WIDTH)
    found = vmap(network.predict, in_dims=(None, 0))(network.params(), x)
    assert found.shape == (2, 3, 2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda _, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
            "scaled_dot_product_attention with dropout",
        ),
        (lambda _, x: F.scaled_dot_product_attention(x, x, x, CAUSAL, is_causal=True), "not both"),
        (multihead(is_causal=True), "is_causal=True needs attn_mask"),
    ],
)
def test_calls_that_cannot_be_run_are_refused(function: Callable[[Any, Tensor], Tensor], message: str):
    network = Network(build(lambda: Attends(attention(), function)), losses.cross_entropy)
    with pytest.raises(ValueError, match=f"observe: the model fails .*{message}"):
        network.check(network.params(), Batch(*(part[0] for part in data()[0])), "observe")


@pytest.mark.parametrize("base", [nn.MultiheadAttention, nn.GRU])
def test_a_subclass_with_dropout_is_refused(base: Any):
    class Own(base):
        pass

    with pytest.raises(
        ValueError, match=rf"layer '0' \(Own\) is a subclass of {base.__name__} that draws .*; build it with dropout=0"
    ):
        Network(
            nn.Sequential(Own(4, 2, dropout=0.1, **({"num_layers": 2} if base is nn.GRU else {}))), losses.cross_entropy
        )
