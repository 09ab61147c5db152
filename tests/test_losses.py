import functools

import pytest
import torch
from oracles import assert_close, labels, normal
from torch.nn import functional as F

from metaleader.losses import cross_entropy, squared_error, takes_labels, unsmoothed


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy_is_torchs(smoothing: float, dtype: torch.dtype):
    logits, target = 3 * normal("logits", 7, 4), labels("y", 4, 7)
    expected = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
    assert_close(cross_entropy(logits, target.to(dtype), smoothing), expected, 1e-12)


def test_cross_entropy_that_is_compiled_is_the_same_with_its_second_derivative(monkeypatch: pytest.MonkeyPatch):
    logits, target = 3 * normal("logits", 7, 4), labels("y", 4, 7)
    loss = lambda z: cross_entropy(z, target.to(torch.int32), 0.1)  # noqa: E731
    eager = loss(logits), torch.func.hessian(lambda z: loss(z).sum())(logits)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_close(loss(logits), eager[0], 1e-14)
    assert_close(torch.func.hessian(lambda z: loss(z).sum())(logits), eager[1], 1e-14)


def test_a_class_may_be_ruled_out_by_minus_infinity():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], dtype=torch.float64)
    assert_close(cross_entropy(logits, torch.tensor([1])), torch.tensor([2.0], dtype=torch.float64).log(), 1e-14)


def test_a_label_out_of_range_is_an_error_or_no_number(monkeypatch: pytest.MonkeyPatch):
    logits, target = normal("logits", 3, 4), torch.tensor([0, 4, -1])
    with pytest.raises(RuntimeError, match="out of bounds"):
        cross_entropy(logits, target)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert cross_entropy(logits, target).isnan().tolist() == [False, True, True]


def test_squared_error_takes_one_output_with_or_without_a_column():
    prediction, target = torch.randn(4, 1), torch.randn(4)
    assert torch.equal(squared_error(prediction, target), (prediction[:, 0] - target) ** 2)


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 4), (6, 2, 3)])
def test_squared_error_averages_the_outputs_of_a_datapoint(shape: tuple[int, ...]):
    prediction, target = normal("p", *shape), normal("t", *shape)
    error = squared_error(prediction, target)
    assert error.shape == (6,)
    assert_close(error.mean(), F.mse_loss(prediction, target), 1e-12)


@pytest.mark.parametrize(
    ("loss", "prediction", "target", "message"),
    [
        (squared_error, torch.ones(3, 2), torch.ones(3), r"\(3, 2\) and target \(3,\)"),
        (cross_entropy, torch.ones(3, 2), torch.zeros(2, dtype=torch.int64), r"\(3, 2\) and \(2,\)"),
        (cross_entropy, torch.ones(3), torch.zeros(3, dtype=torch.int64), r"logits \(N, classes\)"),
        (cross_entropy, torch.ones(3, 2), torch.zeros(3), r"y\.long\(\)"),
        (cross_entropy, torch.ones(3, 2), torch.zeros(3, dtype=torch.bool), "integer labels"),
    ],
)
def test_wrong_shapes_and_dtypes(loss, prediction: torch.Tensor, target: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        loss(prediction, target)


def test_the_reported_loss_has_no_smoothing():
    smoothed = functools.partial(cross_entropy, smoothing=0.1)
    assert unsmoothed(smoothed) is cross_entropy
    assert unsmoothed(squared_error) is squared_error
    assert [takes_labels(loss) for loss in (cross_entropy, smoothed, squared_error)] == [True, True, False]
