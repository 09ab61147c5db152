from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
import torch.masked
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from metaleader import tasks
from metaleader.tasks import Batch, Task, TaskStream, check_alike, check_batch, rng, row_signature


def batch(rows: int = 3) -> Batch:
    return Batch(torch.ones(rows, 2), torch.zeros(rows, dtype=torch.int64))


@pytest.mark.parametrize(
    "x", [np.ones((2, 3)), [np.ones(2)], {"a": np.ones(2), "b": torch.ones(2, 4)}, (np.ones(2), torch.ones(2, 1))]
)
def test_array_likes_become_tensors(x: Any):
    checked = check_batch(Batch(x, np.arange(2)), "here")
    assert all(isinstance(leaf, torch.Tensor) for leaf in tasks.tree_leaves(checked))
    assert tasks.num_rows(checked) == 2
    if isinstance(x, dict | tuple | list):
        assert type(checked.x) is type(x)


def test_a_batch_is_cut_off_from_autograd_and_keeps_its_dtype():
    checked = check_batch(Batch(torch.ones(2, 1, requires_grad=True), torch.zeros(2, dtype=torch.uint8)), "here")
    assert not checked.x.requires_grad
    assert checked.y.dtype == torch.uint8


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.ones(0, 2), torch.ones(0), "empty"),
        (torch.ones(3, 2), torch.ones(2), r"\[2, 3\] rows"),
        ({"a": torch.ones(3), "b": torch.ones(4)}, torch.ones(3), r"\[3, 4\] rows"),
        (torch.tensor([[1.0, float("nan")]]), torch.ones(1), "x holds 1 NaN or infinite"),
        (torch.ones(2), torch.tensor([1.0, float("inf")]), "y holds 1 NaN or infinite"),
        (torch.tensor(1.0), torch.ones(1), "x holds a single value"),
        ([1.0, 2.0], torch.ones(2), "x holds a single value; .*a list is taken for several"),
        (["a", "b"], torch.ones(2), "x is not numeric: got str"),
        (torch.ones(1, dtype=torch.complex64), torch.ones(1), "complex"),
        (torch.ones(1).to(torch.float8_e4m3fn), torch.ones(1), "x is a Tensor of torch.float8_e4m3fn"),
        (torch.ones(1), torch.ones(1).to(torch.float8_e5m2), "y is a Tensor of torch.float8_e5m2"),
        (np.ma.masked_array(np.ones(2), [True, False]), torch.ones(2), "x is a masked array"),
        (torch.ones(2), np.ma.masked_array(np.ones(2), [False, False]), "y is a masked array"),
        ({}, torch.ones(1), "holds no tensor"),
        (None, torch.ones(1), "not numeric: got NoneType"),
    ],
)
def test_what_cannot_be_a_batch_is_refused(x: Any, y: Any, message: str):
    with pytest.raises(ValueError, match=f"here: .*{message}"):
        check_batch(Batch(x, y), "here")


@pytest.mark.filterwarnings("ignore:The PyTorch API of (Masked|nested)")
def test_tensors_without_values_of_their_own_are_refused():
    with FakeTensorMode():
        fake = torch.ones(2)
    masked = torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for x, name in ((fake, "FakeTensor"), (masked, "MaskedTensor"), (nested, "nested")):
        with pytest.raises(ValueError, match=f"here: x is a .*{name}.*pass a dense tensor"):
            check_batch(Batch(x, torch.ones(2)), "here")


@given(
    row=st.integers(0, 4), column=st.integers(0, 1), bad=st.sampled_from([float("nan"), float("inf"), -float("inf")])
)
def test_a_bad_value_anywhere_is_found(row: int, column: int, bad: float):
    x = torch.ones(5, 2)
    x[row, column] = bad
    with pytest.raises(ValueError, match="1 NaN or infinite"):
        check_batch(Batch(x, torch.zeros(5)), "observe")


def test_task_checks_its_parts_and_stays_as_it_is():
    task = Task("a", Batch(np.ones((3, 2)), np.arange(3)), batch(), ids=torch.arange(3))
    assert isinstance(task.train.x, torch.Tensor)
    with pytest.raises(AttributeError):
        task.name = "b"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Task("a", batch(), batch(0)), "task 'a', test: the batch is empty"),
        (lambda: Task("a", torch.ones(3), batch()), "train must be a Batch"),  # pyright: ignore[reportArgumentType]
        (lambda: Task("a", batch(), (1, 2, 3)), "test must be a Batch"),  # pyright: ignore[reportArgumentType]
        (lambda: Task("a", batch(), batch(), ids=torch.arange(2)), "2 ids for 3"),
    ],
)
def test_task_refuses(make: Callable[[], Task], message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_list_of_tasks_is_a_stream():
    assert isinstance([Task("a", batch(), batch())], TaskStream)
    assert not isinstance(3, TaskStream)


@pytest.mark.parametrize(
    "other",
    [
        Batch(torch.ones(3, 3), batch().y),
        Batch(torch.ones(3, 2, dtype=torch.float64), batch().y),
        Batch((torch.ones(3, 2),), batch().y),
        Batch(batch().x, torch.zeros(3, 1, dtype=torch.int64)),
    ],
)
def test_batches_of_a_learner_are_alike(other: Batch):
    check_alike(batch(5), batch(3), "observe")
    with pytest.raises(ValueError, match=r"observe: [xy] has rows of .* earlier datapoints have"):
        check_alike(other, batch(), "observe")


def test_rng_depends_on_purpose_and_key_alone():
    def first(*key: Any) -> float:
        return rng(*key).random()

    again = first("draw", 1, 2)
    drawn = [first("draw", 1, 2), first("draw", 1, 3), first("draw", 2, 2), first("drav", 1, 2), first("draw", 12)]
    assert drawn[0] == again
    assert len(set(drawn)) == len(drawn)
    for key in [(0,), (7, 2**32 - 1), (2**32,), (2**70, 3)]:
        assert first("draw", *key) == np.random.default_rng([*b"draw", *key]).random()
    with pytest.raises(ValueError, match="non-negative"):
        rng("draw", -1)
    with pytest.raises(TypeError, match="integer"):
        rng("draw", 0.9)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            pd.DataFrame({"a": [1.0], "b": ["u"], "c": [True]}),
            "a DataFrame whose columns b, c are not numbers; convert",
        ),
        (pl.DataFrame({"a": [1.0], "b": ["u"]}), "a DataFrame whose columns b are not numbers"),
        (pd.DataFrame({"a": [1.0, float("nan")]}), "x holds 1 NaN"),
        (pl.DataFrame({"a": [1.0, None]}), "x holds 1 NaN"),
        (pd.Series(["u"]), "got Series"),
        (np.array(["u"]), "got ndarray of dtype <U1"),
        (torch.utils.data.TensorDataset(torch.ones(2)), "a TensorDataset of torch; make a stream with .*from_dataset"),
        (torch.utils.data.DataLoader([1, 2]), "a DataLoader of torch; make a stream"),  # pyright: ignore
    ],
)
def test_frames_and_datasets_that_are_no_numbers(x: Any, message: str):
    with pytest.raises(ValueError, match=message):
        check_batch(Batch(x, torch.ones(1)), "here")


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 3),
        torch.zeros(2, dtype=torch.uint8),
        {"b": torch.zeros(2, 1), "a": torch.zeros(2)},
        (torch.zeros(2, 1), [torch.zeros(2, 4)]),
        {"it's": {"in": torch.zeros(2, 1)}},
    ],
)
def test_signatures_of_rows_are_those_of_the_pytree(x):
    data = Batch(x, torch.zeros(2, dtype=torch.int64))
    described = tree_map(lambda leaf: f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape[1:])}", data)
    assert row_signature(data) == str(described).replace("'", "")


def test_arrays_of_float64_get_the_default_dtype_and_tensors_keep_theirs():
    x, y = np.ones((3, 2)), np.ones(3)
    task = Task("a", Batch(x, y), Batch(torch.from_numpy(x), torch.from_numpy(y)))
    assert (task.train.x.dtype, task.train.y.dtype) == (torch.float32, torch.float32)
    assert (task.test.x.dtype, task.test.y.dtype) == (torch.float64, torch.float64)
