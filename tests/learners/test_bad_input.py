"""Bad input, drawn at random: a ValueError (or OSError) with the value and the remedy, the learner as before the call.

The learners are shared between the examples of a test: each must find its learner untouched.
"""

import contextlib
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import metaleader as ml
from metaleader.checks.trees import differences, snapshot


def examples(*strategies: Any, num: int = 25) -> Callable[[Any], Any]:
    """Run a test on the same examples every time; files in `tmp_path` are written anew by each."""
    shared = [HealthCheck.function_scoped_fixture]
    options = settings(max_examples=num, deadline=None, derandomize=True, database=None, suppress_health_check=shared)
    return lambda test: options(given(*strategies)(test))


INPUTS, CLASSES = 4, 3
LOSSES: dict[str, Any] = {
    "labels": ml.losses.cross_entropy,
    "smoothed": functools.partial(ml.losses.cross_entropy, smoothing=0.1),
    "users": nn.functional.cross_entropy,
    "regression": ml.losses.squared_error,
}


def make(loss: Any = "labels", observed: int = 0, begun: bool = True) -> ml.FTML:
    learner = ml.FTML(
        lambda: ml.models.mlp(INPUTS, CLASSES, (5,)),
        LOSSES.get(loss, loss) if isinstance(loss, str) else loss,
        support=2,
        query=2,
        meta_steps=2,
        tasks_per_step=2,
        inner_steps=1,
    )
    if begun:
        learner.begin("a task")
    if observed:
        learner.observe(*batch(observed, regression=loss == "regression"))
    return learner


def batch(num: int, regression: bool = False) -> ml.Batch:
    generator = torch.Generator().manual_seed(num)
    x = torch.randn(num, INPUTS, generator=generator)
    return ml.Batch(x, x[:, :CLASSES] if regression else torch.randint(CLASSES, (num,), generator=generator))


def refused(learner: ml.Learner, x: Any, y: Any, match: str, update: bool = True) -> None:
    before = snapshot(learner)
    with pytest.raises(ValueError, match=match):
        learner.observe(x, y, update=update)
    assert not differences(before, learner.state_dict())


FRESH = {name: make(name) for name in LOSSES}
OLD = {name: make(name, observed=6) for name in LOSSES}
LEARNERS = st.sampled_from([FRESH, OLD])
SIZES = st.integers(1, 12)


@examples(
    LEARNERS, SIZES, st.sampled_from(["x", "y"]), st.sampled_from([np.nan, np.inf, -np.inf]), st.booleans(), st.data()
)
def test_nan_and_infinity(learners: Any, num: int, part: str, value: float, update: bool, data: Any) -> None:
    good = batch(num, regression=True)
    spoiled = getattr(good, part).clone()
    places = data.draw(st.sets(st.integers(0, spoiled.numel() - 1), min_size=1))
    spoiled.view(-1)[list(places)] = value
    x, y = good._replace(**{part: spoiled})
    refused(learners["regression"], x, y, f"{part} holds {len(places)} NaN or infinite values; clean or drop", update)


@examples(LEARNERS, st.sampled_from(list(LOSSES)), SIZES, st.booleans(), st.data())
def test_inputs_of_another_shape(learners: Any, loss: str, num: int, update: bool, data: Any) -> None:
    shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple).filter(lambda shape: shape[-1:] != (INPUTS,))
    shape = data.draw(shapes)
    text = str(list(shape)).replace("[", r"\[").replace("]", r"\]")
    y = batch(num, regression=loss == "regression").y
    refused(learners[loss], torch.zeros(num, *shape), y, rf"x .*rows of float32{text}.*(pass|share)", update)


@examples(LEARNERS, SIZES, st.booleans(), st.data())
def test_targets_of_another_shape(learners: Any, num: int, update: bool, data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3).map(tuple).filter(lambda shape: shape != (CLASSES,)))
    message = r"share one shape" if learners is OLD else r"reshape the target"
    refused(learners["regression"], batch(num).x, torch.zeros(num, *shape), message, update)


DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.bool, torch.complex64]


@examples(LEARNERS, st.sampled_from(list(LOSSES)), SIZES, st.sampled_from(DTYPES), st.booleans())
def test_inputs_of_another_dtype(learners: Any, loss: str, num: int, dtype: torch.dtype, update: bool) -> None:
    good = batch(num, regression=loss == "regression")
    name = str(dtype).removeprefix("torch.")
    refused(learners[loss], good.x.to(dtype), good.y, rf"{name}.*(convert|share|pass)", update)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_whole_numbers_are_targets_of_squared_error(dtype: torch.dtype) -> None:
    """Whole numbers in the first datapoints do not exclude fractions in later ones."""
    learner = ml.TOE(ml.models.mlp(2, 1, (4,)), ml.losses.squared_error, meta_steps=1, query=2)
    x, whole = torch.rand(3, 2), torch.tensor([1, 2, 3])
    for y in (whole.to(dtype), whole + 0.5, whole.to(dtype)[:, None]):
        learner.observe(x, y, task="a")
    stored = learner.memory.named("a")
    assert stored is not None
    assert torch.equal(stored.y, torch.tensor([1, 2, 3, 1.5, 2.5, 3.5, 1, 2, 3])[:, None])


@examples(LEARNERS, SIZES, st.sampled_from([torch.float32, torch.float64, torch.bool]), st.booleans())
def test_labels_that_are_not_integers(learners: Any, num: int, dtype: torch.dtype, update: bool) -> None:
    x, y = batch(num)
    name = str(dtype).removeprefix("torch.")
    refused(learners["labels"], x, y.to(dtype), rf"{name}.*(convert|share)", update)


@examples(LEARNERS, st.sampled_from(["labels", "smoothed"]), SIZES, st.integers(-300, 300), st.booleans(), st.data())
def test_labels_out_of_range(learners: Any, loss: str, num: int, label: int, update: bool, data: Any) -> None:
    x, y = batch(num)
    label = label - CLASSES if 0 <= label < CLASSES else label
    y[data.draw(st.integers(0, num - 1))] = label
    message = rf"labels must lie in 0\.\.{CLASSES - 1}.*got {int(y.min())}\.\.{int(y.max())}"
    refused(learners[loss], x, y, message, update)


@examples(LEARNERS, SIZES, st.integers(CLASSES, 300), st.booleans(), st.data())
def test_labels_that_a_loss_of_the_users_own_refuses(
    learners: Any, num: int, label: int, update: bool, data: Any
) -> None:
    x, y = batch(num)
    y[data.draw(st.integers(0, num - 1))] = label
    refused(learners["users"], x, y, f"the loss fails.*{label} is out of bounds", update)


@examples(LEARNERS, st.sampled_from(list(LOSSES)), st.booleans())
def test_an_empty_batch(learners: Any, loss: str, update: bool) -> None:
    good = batch(1, regression=loss == "regression")
    refused(learners[loss], good.x[:0], good.y[:0], "the batch is empty; pass at least one datapoint", update)


@examples(LEARNERS, SIZES, SIZES, st.booleans())
def test_unequal_numbers_of_rows(learners: Any, num: int, other: int, update: bool) -> None:
    other += num == other
    low, high = sorted([num, other])
    refused(
        learners["labels"], batch(num).x, batch(other).y, rf"one row per datapoint, got \[{low}, {high}\] rows", update
    )


JUNK = st.none() | st.text(max_size=3) | st.binary(max_size=3) | st.just(object()) | st.just(lambda: None)
SCALARS = st.integers(-3, 3) | st.floats(-3, 3) | st.booleans()


@examples(LEARNERS, st.sampled_from(["x", "y"]), JUNK | st.lists(JUNK, min_size=1, max_size=2), st.booleans())
def test_what_is_not_numeric(learners: Any, part: str, junk: Any, update: bool) -> None:
    x, y = batch(2)._replace(**{part: junk})
    refused(learners["labels"], x, y, f"{part} .*(pass tensors or arrays|datapoints)", update)


@examples(LEARNERS, st.sampled_from(["x", "y"]), SCALARS | SCALARS.map(torch.tensor), st.booleans())
def test_a_single_value(learners: Any, part: str, value: Any, update: bool) -> None:
    x, y = batch(2)._replace(**{part: value})
    refused(learners["labels"], x, y, f"{part} .*single value", update)


@pytest.mark.parametrize(
    "x", [batch(2).x.to_sparse(), batch(2).x.to("meta"), {}, (), {"a": batch(2).x}, [batch(2).x] * 2]
)
@pytest.mark.parametrize("learners", [FRESH, OLD])
def test_inputs_of_another_kind(learners: Any, x: Any) -> None:
    refused(learners["labels"], x, batch(2).y, r"x .*(pass|share)")


@examples(SIZES, st.booleans())
def test_observe_before_begin(num: int, update: bool) -> None:
    refused(make(begun=False), *batch(num), r"observe before begin: call begin\(name\)", update)


@examples(SIZES, st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), st.booleans(), num=15)
def test_a_loss_of_the_wrong_shape(num: int, shape: tuple[int, ...], update: bool) -> None:
    if shape in ((num,), (min(num, 2),)):
        shape = (*shape, 1)
    learner = make(lambda prediction, target: prediction.sum() * torch.ones(shape))
    text = str(shape).replace("(", r"\(").replace(")", r"\)")
    refused(learner, *batch(num), rf"the loss must return one value per datapoint, .* or a scalar; got {text}", update)


@pytest.mark.parametrize("value", [None, 1.0, "loss", (torch.zeros(()),)])
def test_a_loss_that_is_no_tensor(value: Any) -> None:
    learner = make(lambda prediction, target: value)
    refused(learner, *batch(3), rf"the loss must return one value per datapoint, .*got {type(value).__name__}")


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device 'cuda' does not exist: torch finds 0 CUDA devices; use cpu"):
        ml.TOE(ml.models.mlp(2, 1), ml.losses.squared_error, device="cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "unknown device 'gpu'; use cpu, cuda or auto"),
        ({"weights": "recent"}, r"weights must be a function of the number of tasks, .*; got 'recent'"),
        ({"inner_lr": "0.1"}, r"inner_lr must be a number, .*; got '0.1'"),
        ({"meta_lr": "0.1"}, r"meta_lr must be a number, .*; got '0.1'"),
        ({"meta_lr": None}, r"meta_lr must be a number, .*; got None"),
        ({"meta_lr": [1]}, r"meta_lr must be a number, .*; got \[1\]"),
        ({"meta_lr": [(0, 0.1), (5.5, 0.1)]}, r"meta_lr must be a number, "),
        ({"clip": "1"}, "clip must be a positive number or None, got '1'"),
        ({"only": -1}, "only must be 'last', a pattern of names of parameters, or None; got -1"),
        ({"only": ["head"]}, r"only must be 'last', .*; got \['head'\]"),
        ({"preprocess": "scale"}, "preprocess must be a function of x, or None; got 'scale'"),
        ({"preprocess": ()}, r"preprocess must be a function of x, or None; got \(\)"),
        ({"device": None}, "unknown device None; use cpu, cuda or auto"),
        ({"data_folder": 3}, "data_folder must be a path or None, got 3"),
    ],
)
def test_settings_that_cannot_be(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ml.FTML(ml.models.mlp(2, 1), ml.losses.squared_error, **options)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    learner = ml.TOE(ml.models.mlp(2, 1), ml.losses.squared_error)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere; make it first"):
        learner.save(tmp_path / "nowhere" / "leader.safetensors")


def test_a_loss_that_is_no_function() -> None:
    with pytest.raises(ValueError, match=r"loss must be a function of .prediction, target., .* got 'mse'"):
        ml.TOE(ml.models.mlp(2, 1), "mse")  # pyright: ignore[reportArgumentType]


def test_a_loss_whose_shape_is_right_for_two_rows_only() -> None:
    refused(
        make(lambda prediction, target: prediction.sum() * torch.ones(2)), *batch(5), r"\(5,\), or a scalar; got \(2,\)"
    )


class Flat(nn.Module):
    """A model that loses the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(0)


def test_a_model_that_loses_the_rows() -> None:
    learner = ml.FTML(Flat, ml.losses.squared_error)
    learner.begin("a task")
    refused(learner, *batch(5), r"the model must return a tensor with one row per datapoint, got \(3,\)")


def test_good_data_is_taken_after_any_refusal() -> None:
    """What was refused first, in shape or dtype, does not decide what comes after."""
    bad = [
        ml.Batch(batch(3).x, batch(3).y + 7),  # the model takes it, the labels are wrong
        ml.Batch(torch.zeros(3, 7), batch(3).y),
        ml.Batch(batch(3).x, batch(3).y.to(torch.int32) - 9),
    ]
    straight = make()
    straight.observe(*batch(6))
    for order in (bad, bad[::-1]):
        learner = make()
        for one in order:
            refused(learner, *one, "observe")
        learner.observe(*batch(6))
        assert not differences(straight.state_dict(), learner.state_dict())


def test_data_that_diverges_does_not_decide_what_comes_after() -> None:
    learner = ml.FTML(lambda: ml.models.mlp(INPUTS, CLASSES).double(), ml.losses.squared_error, meta_steps=1)
    learner.begin("a task")
    x, y = batch(3, regression=True)
    refused(learner, x.double() * 1e200, y.double(), "not finite")
    other = ml.Batch(x.double(), y.double())
    learner.observe(*other)
    assert learner.num_datapoints == 3


# Tasks.


@examples(st.sampled_from(["train", "test"]), st.sampled_from([np.nan, np.inf]), SIZES)
def test_a_task_is_checked_where_it_is_made(part: str, value: float, num: int) -> None:
    x, y = batch(num)
    parts: Any = {"train": ml.Batch(x, y), "test": ml.Batch(x, y)}
    x = x.clone()
    x[-1] = value
    with pytest.raises(ValueError, match=rf"task 'a', {part}: x holds {INPUTS} NaN"):
        ml.Task("a", **parts | {part: ml.Batch(x, y)})
    with pytest.raises(ValueError, match=rf"task 'a', {part}: the batch is empty"):
        ml.Task("a", **parts | {part: ml.Batch(x[:0], y[:0])})
    with pytest.raises(ValueError, match=rf"{part} must be a Batch\(x, y\), got Tensor"):
        ml.Task("a", **parts | {part: x})


# Files.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "leader.safetensors"
    OLD["labels"].save(path)
    return path


def load(path: Path, hidden: tuple[int, ...] = (5,)) -> ml.FTML:
    return ml.FTML.load(path, lambda: ml.models.mlp(INPUTS, CLASSES, hidden), ml.losses.cross_entropy)


@examples(st.lists(st.integers(1, 8), max_size=3).map(tuple).filter(lambda hidden: hidden != (5,)))
def test_a_checkpoint_of_another_model(saved: Path, hidden: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"the state belongs to another model: .*(saved \(|only in the)"):
        load(saved, hidden)
    learner = ml.FTML(lambda: ml.models.mlp(INPUTS, CLASSES, hidden), ml.losses.cross_entropy)
    before = snapshot(learner)
    with pytest.raises(ValueError, match="the state belongs to another model"):
        learner.load_state_dict(OLD["labels"].state_dict())
    assert not differences(before, learner.state_dict())


@pytest.mark.parametrize("begun", [False, True])
def test_a_checkpoint_with_another_loss_preprocess_or_activation(
    begun: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All shapes are the same, so only the numbers tell."""

    def no_labels(prediction: Tensor, y: Tensor) -> Tensor:
        raise RuntimeError("no labels")

    net = lambda: ml.models.mlp(INPUTS, CLASSES, (5,))  # noqa: E731
    learner = ml.FTML(net, ml.losses.cross_entropy, preprocess=torch.neg)
    learner.begin("a")
    x, y = torch.linspace(-2, 3, 4 * INPUTS).reshape(4, INPUTS), torch.arange(4) % CLASSES
    learner.observe(x, y, update=False)
    if begun:
        learner.begin("b")
    path = tmp_path / "leader.safetensors"
    learner.save(path)
    smooth = functools.partial(ml.losses.cross_entropy, smoothing=0.3)
    tanh = net()
    tanh.relu0 = nn.Tanh()
    for model, loss, preprocess in (
        (net, smooth, torch.neg),
        (net, ml.losses.cross_entropy, torch.abs),
        (tanh, ml.losses.cross_entropy, torch.neg),
    ):
        caplog.clear()
        ml.FTML.load(path, model, loss, preprocess=preprocess)
        assert "was saved with a loss of " in caplog.text
    with pytest.raises(ValueError, match=r"the model or the loss fails on the data of .*: no labels; pass those that"):
        ml.FTML.load(path, net, no_labels, preprocess=torch.neg)
    with pytest.raises(ValueError, match=r"load takes data_folder, device, engine, preprocess, not devise"):
        ml.FTML.load(path, net, ml.losses.cross_entropy, preprocess=torch.neg, devise="cpu")
    with pytest.raises(ValueError, match=r"\['seed'\] come from the file"):
        ml.FTML.load(path, net, ml.losses.cross_entropy, preprocess=torch.neg, seed=1)
    with pytest.raises(ValueError, match="predict_many takes inputs by name of the task, as a dict; got list"):
        learner.predict_many([x])  # pyright: ignore[reportArgumentType]
    caplog.clear()
    ml.FTML.load(path, net, ml.losses.cross_entropy, preprocess=torch.neg)
    assert not caplog.text


def test_no_file_is_lost_to_a_check(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A network that takes no single row, and parameters with which the loss is not finite."""

    class Squeezed(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).squeeze()

    path = tmp_path / "leader.safetensors"
    learner = ml.TOE(lambda: Squeezed(INPUTS, CLASSES), ml.losses.cross_entropy)
    learner.begin("one")
    with pytest.raises(ValueError, match="observe"):
        learner.observe(torch.ones(1, INPUTS), torch.ones(1, dtype=torch.int64), update=False)
    learner.begin("two")
    learner.observe(torch.ones(2, INPUTS), torch.ones(2, dtype=torch.int64), update=False)
    learner.save(path)
    with torch.no_grad():
        learner.params["weight"].fill_(math.inf)
    learner.save(path)
    loaded = ml.TOE.load(path, lambda: Squeezed(INPUTS, CLASSES), ml.losses.cross_entropy)
    assert torch.isinf(loaded.params["weight"]).all()
    assert not caplog.text


@examples(st.data())
def test_a_truncated_checkpoint(saved: Path, tmp_path: Path, data: Any) -> None:
    whole = saved.read_bytes()
    path = tmp_path / "short.safetensors"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ValueError, match=r"short\.safetensors is truncated or not a safetensors file .*intact copy"):
        load(path)


@examples(st.binary(max_size=200))
def test_a_file_of_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.safetensors is truncated or not a safetensors file"):
        load(path)


@examples(st.data(), num=200)
def test_a_damaged_header_is_refused_or_harmless(saved: Path, tmp_path: Path, data: Any) -> None:
    """One other byte in the header: no error but a ValueError, whatever it hits."""
    content = bytearray(saved.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    with contextlib.suppress(ValueError):
        load(path)


def test_a_file_of_another_kind_or_of_the_future(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="not a metaleader-learner file"):
        load(path)
    with safetensors.safe_open(saved, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    safetensors.torch.save_file(tensors, path, metadata | {"version": "99"})
    with pytest.raises(ValueError, match=r"version 99.*upgrade"):
        load(path)
    safetensors.torch.save_file(tensors, path, metadata | {"tree": json.dumps({"dict": {}})})
    with pytest.raises(ValueError, match="damaged"):
        load(path)


def test_no_file_there(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(OSError, match=path.name):
            load(path)


@pytest.mark.parametrize("steps", [1.5, -1, True, "2", math.nan])
def test_numbers_of_updates(steps: Any) -> None:
    learner = make(observed=4)
    before = snapshot(learner)
    with pytest.raises(ValueError, match=f"steps must be an integer of at least 0, got {steps!r}"):
        learner.update(steps)
    assert not differences(before, snapshot(learner))
