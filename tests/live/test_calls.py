"""Calls come back from their records as they were."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten

from metaleader.live.calls import Codec, Observe, Predict, Readmit, Settings, State, Update, digest, fingerprint

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.bool]
KEY = digest("key", "event 17")


def same(tree, other):
    """Trees of tensors with the same bits."""
    (leaves, spec), (others, other_spec) = tree_flatten(tree), tree_flatten(other)
    return spec == other_spec and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(leaves, others, strict=True)
    )


def trees(rows):
    leaf = st.builds(
        lambda shape, dtype: (torch.randn(rows, *shape) * 100).to(dtype),
        st.lists(st.integers(0, 3), max_size=2),
        st.sampled_from(DTYPES),
    )
    return st.recursive(leaf, lambda children: st.dictionaries(st.text(max_size=3), children, min_size=1, max_size=2)
        | st.lists(children, min_size=1, max_size=2) | st.tuples(children, children), max_leaves=4)  # fmt: skip


def calls():
    batches = st.integers(1, 200).flatmap(lambda rows: st.tuples(st.text(max_size=200), trees(rows), trees(rows)))
    number = st.integers(0, 2**40)
    return st.one_of(
        st.builds(
            lambda b, key, updates: Observe(b[0], b[1], b[2], key, updates),
            batches,
            st.none() | st.just(KEY),
            st.sampled_from(["none", "now", "later"]),
        ),
        st.builds(lambda b: Predict(b[0], b[1], KEY), batches),
        st.builds(Update, number, number, st.booleans()),
        st.builds(Readmit, st.text()),
        st.just(Settings({"a": [1, None, {"b": "ü"}]})),
        st.builds(State, st.binary()),
    )


@settings(max_examples=40)
@given(st.lists(calls(), max_size=5))
def test_calls_come_back_as_they_were(written):
    writer, reader = Codec(), Codec()
    read = [reader.decode(record) for call in written for record in writer.encode(call)]
    assert same([call for call in read if call is not None], written)
    again = Codec(writer.schemas)
    assert all(len(again.encode(call)) == 1 for call in written)
    observed = [call for call in written if isinstance(call, Observe)]
    for one in observed:
        for other in observed:
            equal = same([one.task, one.x, one.y], [other.task, other.x, other.y])
            assert (fingerprint(one) == fingerprint(other)) == equal


def test_a_schema_is_written_once():
    codec, x, y = Codec(), torch.randn(5, 3), torch.randn(5)
    sizes = [
        [len(record) for record in codec.encode(Observe("customer 3", x[:rows], y[:rows], KEY, "now"))]
        for rows in (5, 5, 2, 1)
    ]
    assert [len(records) for records in sizes] == [2, 1, 1, 1]
    # Kind, key, schema, rows, length of the name, name, data.
    assert [records[-1] for records in sizes] == [1 + 16 + 1 + 1 + 1 + 10 + 16 * rows for rows in (5, 5, 2, 1)]
    assert len(codec.encode(Observe("customer 3", x.double(), y, KEY, "now"))) == 2


def test_tensors_are_stored_as_they_are():
    x = torch.arange(12.0).reshape(4, 3).t()[::2]  # neither contiguous nor at the start of its storage
    (*_, record) = Codec().encode(Observe("a", x, x.requires_grad_(), None, "none"))
    assert record.endswith(2 * x.detach().contiguous().numpy().tobytes())


def test_unknown_records_are_refused():
    with pytest.raises(ValueError, match="kind 9, which this release does not know; upgrade"):
        Codec().decode(b"\x09abc")
    with pytest.raises(ValueError, match="kind 0"):
        Codec().decode(b"")
    codec = Codec()
    schema, record = codec.encode(Observe("a", torch.zeros(2), torch.zeros(2), None, "none"))
    reader = Codec()
    reader.decode(schema)
    with pytest.raises(ValueError, match="holds 17 bytes of data, its schema says 16"):
        reader.decode(record + b"x")
    with pytest.raises(ValueError, match="description of the tensors of a record of task 'a' is missing"):
        Codec().decode(record)
    with pytest.raises(ValueError, match="got dict"):
        codec.encode(Observe("a", {1: torch.zeros(2)}, torch.zeros(2), None, "none"))
    with pytest.raises(ValueError, match="got Other"):
        codec.encode(Observe("a", type("Other", (tuple,), {})([torch.zeros(2)]), torch.zeros(2), None, "none"))
