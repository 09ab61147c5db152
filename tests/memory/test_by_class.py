"""The n-way memory: against its definition, row by row."""

import collections
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import metaleader as ml
from metaleader.evaluate import preload
from metaleader.memory.by_class import ClassBuffer
from metaleader.memory.rows import recency
from metaleader.tasks import Batch


def images(ids):
    """An image that carries its id, so that a row tells which image it is."""
    return torch.as_tensor(ids, dtype=torch.float32)[:, None]


def drawn(buffer, *arguments, **options) -> Any:
    draw = buffer.draw(*arguments, **options)
    assert draw is not None
    return draw


def feed(buffer, classes, ids, labels):
    buffer.begin("task", classes)
    buffer.append(Batch(images(ids), torch.as_tensor(labels)), ids)


def filled(per_class=6, num_classes=7, ways=3):
    """Image i is of class 10 + i % num_classes."""
    buffer = ClassBuffer()
    for first in range(num_classes - ways + 1):
        classes = [10 + first + k for k in range(ways)]
        ids = [c - 10 + num_classes * k for k in range(per_class) for c in classes]
        feed(buffer, classes, ids, [classes.index(10 + i % num_classes) for i in ids])
    return buffer


def test_each_image_is_kept_once_and_the_new_ones_are_counted():
    buffer = ClassBuffer()
    feed(buffer, (7, 3), [0, 1, 2, 3], [0, 1, 0, 1])
    assert (buffer.num_datapoints, buffer.num_new, len(buffer)) == (4, 4, 2)
    buffer.begin("next", (9, 7))
    assert buffer.current() is None
    buffer.append(Batch(images([0, 4, 2, 5, 5]), torch.tensor([1, 0, 1, 0, 0])), torch.tensor([0, 4, 2, 5, 5]))
    assert (buffer.num_datapoints, buffer.num_new, len(buffer)) == (6, 2, 3)
    assert buffer.counts().tolist() == [2, 2, 2]  # classes 7, 3, 9 in the order of arrival
    data = buffer.current()
    assert data is not None
    assert data.x[:, 0].tolist() == [0, 4, 2, 5, 5]
    assert data.y.tolist() == [1, 0, 1, 0, 0]


def test_without_ids_every_image_is_new():
    buffer = ClassBuffer()
    for _ in range(2):
        buffer.begin("task", (0, 1))
        buffer.append(Batch(images([0, 1]), torch.tensor([0, 1])))
    assert (buffer.num_datapoints, buffer.num_new) == (4, 2)


def test_a_drawn_task_has_distinct_classes_shuffled_labels_and_disjoint_sets():
    buffer = filled()
    draw = drawn(buffer, 0, range(40), tasks=5, support=6, query=3)
    assert draw.support.shape == draw.support_y.shape == (40, 5, 6)
    assert draw.query.shape == draw.query_y.shape == (40, 5, 3)
    label_of = collections.defaultdict(set)
    for step in range(40):
        support, query = buffer.gather(draw.at(step))
        for task in range(5):
            by_label = collections.defaultdict(set)
            for batch, each in ((support, 2), (query, 1)):
                assert sorted(batch.y[task].tolist()) == sorted([0, 1, 2] * each)
                for image, label in zip(batch.x[task, :, 0].tolist(), batch.y[task].tolist(), strict=True):
                    by_label[label].add(10 + int(image) % 7)
                    assert draw.classes[step, task, label] == 10 + int(image) % 7
            assert all(len(classes) == 1 for classes in by_label.values())
            assert len(set.union(*by_label.values())) == 3
            seen = support.x[task, :, 0].tolist() + query.x[task, :, 0].tolist()
            assert len(set(seen)) == 9
            for label, (cls,) in by_label.items():
                label_of[cls].add(label)
    assert all(labels == {0, 1, 2} for labels in label_of.values())
    assert len(label_of) == 7


def test_draws_are_uniform_over_classes_and_images():
    buffer = filled(per_class=4)
    draw = drawn(buffer, 1, range(700), tasks=3, support=3, query=3)
    counts = torch.bincount(torch.cat([draw.support.flatten(), draw.query.flatten()]), minlength=28).double()
    expected = 700 * 3 * 6 / 28
    # Binomial: five standard deviations.
    assert float((counts - expected).abs().max()) < 5 * expected**0.5


def test_weights_are_a_draw_without_replacement():
    buffer = filled(num_classes=3, ways=2)
    buffer.weights = lambda num: np.array([1.0, 2.0, 3.0])
    draw = drawn(buffer, 0, range(4000), tasks=1, support=0, query=2)
    image = buffer.gather(draw)[1].x[..., 0].long() % 3
    pairs = collections.Counter(tuple(sorted(row)) for row in image[:, 0].tolist())
    # P({a, b}) = w_a/W w_b/(W - w_a) + w_b/W w_a/(W - w_b)
    for (a, b), probability in {(0, 1): 1 / 15 + 1 / 12, (0, 2): 1 / 10 + 1 / 6, (1, 2): 1 / 4 + 1 / 3}.items():
        assert abs(pairs[a, b] / 4000 - probability) < 5 * (probability * (1 - probability) / 4000) ** 0.5
    # Labels stay shuffled: the heaviest class is not always label 0.
    labels = draw.query_y[:, 0][image[:, 0] == 2]
    assert abs(float(labels.double().mean()) - 0.5) < 0.05
    buffer.weights = lambda num: np.array([1.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="leave 1 classes"):
        buffer.draw(0, [0], 1, 0, 2)
    buffer.weights = recency(1.0)
    assert buffer.draw(0, [0], 1, 0, 2) is not None


def test_a_draw_depends_on_seed_and_step_alone():
    buffer = filled()
    whole = drawn(buffer, 3, [5, 6, 7], 4, 3, 3)
    single = drawn(buffer, 3, [6], 4, 3, 3)
    for one, several in zip(single, whole, strict=True):
        assert torch.equal(one[0], several[1])
    assert not torch.equal(whole.support[0], whole.support[1])


def test_short_pools_are_divided_and_repeated():
    buffer = ClassBuffer()
    feed(buffer, (0, 1), [0, 2, 4, 1], [0, 0, 0, 1])  # three images of class 0, one of class 1
    draw = drawn(buffer, 0, range(20), tasks=1, support=4, query=4)
    for step in range(20):
        support, query = buffer.gather(draw.at(step))
        for label in (0, 1):
            s = set(support.x[0, support.y[0] == label, 0].tolist())
            q = set(query.x[0, query.y[0] == label, 0].tolist())
            if 1.0 in s | q:
                assert s == q == {1.0}  # a single image is both
            else:
                assert not s & q
                assert s | q == {0.0, 2.0, 4.0}


def test_past_and_current():
    buffer = ClassBuffer()
    assert buffer.draw(0, [0], 1, 0, 2) is None
    feed(buffer, (0, 1), [0, 1], [0, 1])
    assert buffer.draw(0, [0], 1, 0, 2, which="past") is None
    feed(buffer, (1, 2), [1, 2, 5], [0, 1, 1])
    past = drawn(buffer, 0, range(30), 2, 0, 2, which="past")
    assert set(past.query.unique().tolist()) == {0, 1}
    current = drawn(buffer, 0, range(30), 2, 0, 3, which="current")
    label_of = {1: 0, 2: 1, 5: 1}
    images, labels = buffer.gather(current)[1]
    assert set(images.unique().tolist()) == {1.0, 2.0, 5.0}
    assert current.classes.unique(dim=0).tolist() == [[[1, 2], [1, 2]]]
    assert all(label_of[int(i)] == int(y) for i, y in zip(images.flatten(), labels.flatten(), strict=True))


def test_nothing_is_drawn_before_enough_classes_are_seen():
    buffer = ClassBuffer()
    feed(buffer, (0, 1, 2), [0, 1], [0, 1])
    assert buffer.draw(0, [0], 1, 3, 3) is None
    buffer.append(Batch(images([2]), torch.tensor([2])), [2])
    assert buffer.draw(0, [0], 1, 3, 3) is not None
    with pytest.raises(ValueError, match="support must be a multiple of the 3 classes"):
        buffer.draw(0, [0], 1, 4, 3)


def test_rollback_and_state():
    buffer = filled()
    before = drawn(buffer, 0, range(5), 3, 3, 3)
    mark = buffer.mark()
    buffer.append(Batch(images([700, 701, 4]), torch.tensor([0, 1, 0])), [700, 701, 4])
    buffer.rollback(mark)
    for a, b in zip(before, drawn(buffer, 0, range(5), 3, 3, 3), strict=True):
        assert torch.equal(a, b)
    buffer.append(Batch(images([700]), torch.tensor([1])), [700])  # the rolled-back id is free again, for another class
    state = buffer.state_dict()
    copy = ClassBuffer()
    copy.load_state_dict(state)
    assert str(copy.current()) == str(buffer.current())
    for a, b in zip(drawn(buffer, 1, [3], 2, 3, 3), drawn(copy, 1, [3], 2, 3, 3), strict=True):
        assert torch.equal(a, b)
    assert copy.num_new == buffer.num_new
    copy.append(Batch(images([700]), torch.tensor([1])), [700])
    assert copy.num_datapoints == buffer.num_datapoints
    light = buffer.state_dict(data=False)
    assert "data" not in light
    copy.load_state_dict(light)
    with pytest.raises(ValueError, match="saved without its data"):
        ClassBuffer().load_state_dict(light)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ((1, 1), "two or more different integers"),
        ((1,), "two or more different integers"),
        ((1.5, 2.5), "must be a list of integers"),
        ("ab", "must be a list of integers"),
    ],
)
def test_bad_classes(classes, message):
    buffer = ClassBuffer()
    feed(buffer, (0, 1), [0, 1], [0, 1])
    state = str(buffer.state_dict())
    with pytest.raises(ValueError, match=message):
        buffer.begin("next", classes)
    assert str(buffer.state_dict()) == state


@pytest.mark.parametrize(
    ("labels", "ids", "message"),
    [
        ([0, 2], None, r"label 2 is not in 0\.\.1"),
        ([0, -1], None, "label -1"),
        ([0.0, 1.0], None, "one integer per datapoint"),
        ([0, 1], [5], "1 ids for 2 datapoints"),
        ([0, 1], [5, -2], "must not be negative, got -2"),
        ([0, 1], [5.0, 6.0], "must be a list of integers"),
        ([0, 1], [1, 5], "id 1 is of class 11, and is now said to be of class 10"),
        ([0, 1], [5, 5], "id 5 is of class 10"),
    ],
)
def test_bad_datapoints_change_nothing(labels, ids, message):
    buffer = ClassBuffer()
    feed(buffer, (10, 11), [0, 1], [0, 1])
    state = str(buffer.state_dict())
    with pytest.raises(ValueError, match=message):
        buffer.append(Batch(images([7, 8]), torch.tensor(labels)), ids)
    assert str(buffer.state_dict()) == state


def learner(kind=ml.FTML, **options):
    torch.manual_seed(0)
    return kind(nn.Linear(1, 2), ml.losses.cross_entropy, meta_steps=2, tasks_per_step=3, query=4, **options)


def stream(num=4):
    tasks = []
    for t in range(num):
        ids = torch.arange(8) + 4 * t  # half of them were in the task before
        task = ml.Batch(images(ids % 5), ids % 2)
        tasks.append(ml.Task(f"task {t}", task, task, classes=(0, 1), ids=ids))
    return tasks


@pytest.mark.parametrize("kind", [ml.FTML, ml.TOE, ml.FTL, ml.Scratch])
def test_learners_play_an_n_way_stream(kind):
    player = learner(kind, **({"support": 4} if kind is ml.FTML else {}))
    records = list(ml.play(player, stream(), reveal=4))
    assert [r.datapoints for r in records] == [4, 8] * 4
    assert [r.more["new_datapoints"] for r in records] == [4, 8, 0, 4, 0, 4, 0, 4]
    assert player.num_new == 4
    assert player.num_datapoints == 8


def test_saving_and_going_on_is_bit_identical(tmp_path):
    whole = learner(support=4)
    list(ml.play(whole, stream(), reveal=4))
    half = learner(support=4)
    list(ml.play(half, stream()[:2], reveal=4))
    half.save(tmp_path / "half.safetensors")
    again = ml.FTML.load(tmp_path / "half.safetensors", nn.Linear(1, 2), ml.losses.cross_entropy)
    records = list(ml.play(again, stream(), reveal=4, start=2))
    assert [r.more["new_datapoints"] for r in records] == [0, 4, 0, 4]
    for name, value in whole.params.items():
        assert torch.equal(value, again.params[name])


def test_mixing_tasks_with_and_without_classes_is_refused():
    player = learner(support=4)
    with pytest.raises(ValueError, match="two or more"):
        player.begin("bad", classes=[3])
    player.begin("plain")
    with pytest.raises(ValueError, match="earlier tasks have none"):
        player.begin("n-way", classes=[0, 1])
    with pytest.raises(ValueError, match="ids belong to n-way tasks"):
        player.observe(images([1]), torch.tensor([0]), ids=[0])
    assert (player.round, player.task, player.num_datapoints) == (0, "plain", 0)
    player = learner(support=4)
    player.begin("n-way", classes=[0, 1])
    with pytest.raises(ValueError, match="earlier tasks have"):
        player.begin("plain")
    learner_of_three = ml.TOE(nn.Linear(1, 3), ml.losses.cross_entropy)
    learner_of_three.begin("n-way", classes=[0, 1])
    with pytest.raises(ValueError, match="label 2"):
        learner_of_three.observe(images([1]), torch.tensor([2]))


def test_an_own_learner_without_the_arguments_still_plays_plain_streams():
    class Own:
        loss = staticmethod(ml.losses.cross_entropy)

        def begin(self, name): ...

        def observe(self, x, y, update=True): ...

        def adapt(self, steps, statistics):
            return [nn.Linear(1, 2) for _ in steps]

    plain = [ml.Task(task.name, task.train, task.test) for task in stream(1)]
    assert len(list(ml.play(Own(), plain, reveal=4))) == 2


def test_preloaded_tasks_are_kept_without_updates():
    player = learner(support=4)
    before = {name: value.clone() for name, value in player.params.items()}
    preload(player, stream(), 3, datapoints=6)
    assert all(torch.equal(before[name], value) for name, value in player.params.items())
    assert player.round == 2
    assert player.num_datapoints == 6
    records = list(ml.play(player, stream(), reveal=4, start=3))
    assert [r.round for r in records] == [3, 3]
    assert [r.more["new_datapoints"] for r in records] == [2, 6]  # ids 12 .. 13 were preloaded
    with pytest.raises(ValueError, match="cannot preload 9 tasks"):
        preload(player, stream(), 9)


def test_a_failed_first_update_leaves_the_learner_free_for_other_data():
    player = learner(support=3)
    player.begin("n-way", classes=[0, 1])
    with pytest.raises(ValueError, match="support must be a multiple of the 2 classes"):
        player.observe(images([0, 1]), torch.tensor([0, 1]), ids=[0, 1])
    assert (player.num_datapoints, player.num_new) == (0, 0)
    # The ids are free again, for other images.
    player.observe(images([5, 6]), torch.tensor([1, 0]), ids=[0, 1], update=False)
    assert player.num_datapoints == 2
    with pytest.raises(ValueError, match="support is set when a learner is built"):
        player.support = 4
