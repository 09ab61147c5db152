"""Exported nets compute what the net computes, in another runtime and for any number of rows."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from metaleader import losses, models
from metaleader.learners import FTML, BayesianHead
from metaleader.nets.export import export


def learner_of(model, x, y, loss=losses.squared_error, **options):
    if "adaptation" not in options:
        options["inner_lr"] = 0.05
    learner = FTML(model, loss, meta_steps=1, support=2, query=2, **options)
    for i, task in enumerate(("a", "b")):
        learner.observe(x, y + i if y.is_floating_point() else y, task=task, update=False)
    return learner


def run(path, **inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == list(inputs)
    return torch.from_numpy(session.run(["y"], {name: np.asarray(value) for name, value in inputs.items()})[0])


def test_both_files_compute_what_the_net_computes(tmp_path):
    x = torch.randn(6, 4)
    learner = learner_of(lambda: models.mlp(4, 2, (8,)), x, torch.randn(6, 2))
    net = learner.adapt(task="b")
    onnx, program = tmp_path / "net.onnx", tmp_path / "net.pt2"
    assert 0 <= export(net, x[:1], onnx, program) < 1e-5
    for rows in (1, 3, 64):
        new = torch.randn(rows, 4)
        expected = learner.predict(new, task="b")
        assert torch.allclose(run(onnx, x=new), expected, atol=1e-5)
        assert torch.allclose(torch.export.load(program).module()(new), expected, atol=1e-5)
    # The net is not the initialisation, nor that of another task.
    assert not torch.allclose(run(onnx, x=x), learner.predict(x, task="a"), atol=1e-2)


def test_images_with_batch_norm_and_dropout(tmp_path):
    """uint8 images are scaled in the file, and batch norm uses the statistics of the task."""

    def build():
        return nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 5)),
        )

    x, y = torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8), torch.tensor([0, 1, 2, 3, 4, 0])
    learner = learner_of(build, x, y, losses.cross_entropy)
    net = learner.adapt(task="a")
    assert export(net, x, tmp_path / "net.onnx") < 1e-5
    new = torch.randint(256, (3, 3, 8, 8), dtype=torch.uint8)
    assert torch.allclose(run(tmp_path / "net.onnx", x=new), net(new), atol=1e-5)
    assert torch.allclose(run(tmp_path / "net.onnx", x=new[:1]), net(new)[:1], atol=1e-5)


def test_a_head_in_closed_form(tmp_path):
    x = torch.randn(6, 4)
    learner = learner_of(lambda: models.mlp(4, 1, (8,)), x, torch.randn(6, 1), adaptation=BayesianHead())
    export(learner.adapt(task="a"), x, tmp_path / "net.onnx")
    assert torch.allclose(run(tmp_path / "net.onnx", x=x), learner.predict(x, task="a"), atol=1e-5)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        a, b = (x["a"], x["b"]) if isinstance(x, dict) else x
        return self.linear(torch.cat([a, b], -1))


@pytest.mark.parametrize("kind", [dict, tuple])
def test_inputs_of_several_tensors(kind, tmp_path):
    parts = {"a": torch.randn(5, 2), "b": torch.randn(5, 1)}
    x = parts if kind is dict else tuple(parts.values())
    learner = FTML(Two, losses.squared_error, support=2, query=2, meta_steps=1)
    learner.observe(x, torch.randn(5, 1), task="a", update=False)
    net = learner.adapt(task="a")
    export(net, x, tmp_path / "net.onnx", tmp_path / "net.pt2")
    names = ("x.a", "x.b") if kind is dict else ("x.0", "x.1")
    found = run(tmp_path / "net.onnx", **dict(zip(names, parts.values(), strict=True)))
    assert torch.allclose(found, net(x), atol=1e-5)


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x) + (1.0 if float(x.sum()) > 0 else 0.0)


def test_what_is_refused(tmp_path):
    net, x = nn.Linear(4, 1), torch.randn(3, 4)
    for paths, message in (((), "name at least one file"), (("net.pt",), r"must end in .onnx or .pt2, got net.pt")):
        with pytest.raises(ValueError, match=message):
            export(net, x, *paths)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        export(net, x, tmp_path / "none" / "net.onnx")
    with pytest.raises(ValueError, match="Fixed cannot be exported"):
        export(Fixed(), x, tmp_path / "net.pt2")
    with pytest.raises(ValueError, match="one tensor with one row per row"):
        export(_Sum(), x, tmp_path / "net.pt2")
    assert list(tmp_path.iterdir()) == []


class _Sum(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, input):
        return super().forward(input).sum()


def test_a_file_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    from metaleader.nets import export as module

    original = module._exported
    monkeypatch.setattr(module, "_exported", lambda net, x: original(nn.Linear(4, 1), x))
    with pytest.raises(ValueError, match=r"net.pt2 computes other outputs than the net, by .*; it is not written"):
        export(nn.Linear(4, 1), torch.randn(3, 4), tmp_path / "net.pt2")
    assert list(tmp_path.iterdir()) == []
