"""Whole programs: what is read from torch's caches of compiled graphs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from metaleader.engine.whole import compile_graph

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:.*lru_cache.*:UserWarning"),
]


@pytest.mark.torture
def test_a_graph_is_compiled_once_for_all_values_of_its_constants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    x = torch.arange(6.0).view(2, 3)
    for factor in (2.0, 3.0):
        constant = torch.full((3,), factor)

        def scaled(x: Tensor) -> list[Tensor]:
            return [x * constant + 1]  # noqa: B023

        graph = make_fx(scaled, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
        assert torch.equal(compile_graph(graph, [x])(x)[0], x * factor + 1)
    assert counters["inductor"]["fxgraph_cache_miss"] == 1
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
