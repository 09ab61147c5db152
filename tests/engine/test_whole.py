"""Whole programs: what is read from torch's caches of compiled graphs."""

from pathlib import Path

import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import metaleader as ml
from metaleader.engine import compiled
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


def test_a_gradient_that_cannot_be_recorded_is_compiled_in_pieces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second derivative of l1_loss; without generating code, as in the table of layers."""
    monkeypatch.setattr(compiled, "compile_whole", lambda function: function)
    caplog.set_level("INFO", logger="metaleader")
    states = []
    for mode in ("eager", "compiled"):
        learner = ml.FTML(
            lambda: ml.models.mlp(2, 1, (4,)),
            F.l1_loss,
            engine=mode,
            tasks_per_step=2,
            support=2,
            query=2,
            meta_steps=2,
        )
        for name in ("a", "b"):
            learner.observe(oracles.normal(name, 6, 2, dtype=torch.float32), torch.ones(6, 1), task=name, update=False)
        learner.update()
        assert learner.engine.mode == mode
        states.append(learner.state.flat)
    assert "compiling it in pieces" in caplog.text
    torch.testing.assert_close(*states)
