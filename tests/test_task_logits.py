"""An output for each global class, of which a task's are chosen: against plain loops that index the logits."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import metaleader as ml
from metaleader.engine import compiled as compiled_module
from metaleader.engine.engine import Engine
from metaleader.evaluate import preload
from metaleader.learners import update_together
from metaleader.presets import PRESETS
from metaleader.regret import UnconvergedWarning, hindsight
from metaleader.streams import Labelled, NWayStream
from metaleader.tasks import rng

NUM_CLASSES, WAYS, INNER_LR = 12, 3, 0.2
SIZES: dict[str, Any] = {"meta_steps": 2, "tasks_per_step": 4, "query": 6, "meta_lr": 0.01}
CROSS_ENTROPY = functools.partial(ml.losses.cross_entropy, smoothing=0.1)


def stream(seed=0, per_class=4) -> Any:
    """Clusters of points, one a class."""
    draw = rng("clusters", 0)
    centres = draw.standard_normal((NUM_CLASSES, 6)) * 2

    def points(num):
        labels = np.repeat(np.arange(NUM_CLASSES), num)
        return centres[labels] + 0.5 * draw.standard_normal((len(labels), 6)), labels

    return NWayStream(Labelled(*points(per_class), *points(10)), ways=WAYS, per_class=per_class, seed=seed)


def body(outputs):
    norm = nn.BatchNorm1d(16, track_running_stats=False)
    return nn.Sequential(nn.Linear(6, 16, bias=False), norm, nn.Tanh(), nn.Linear(16, outputs)).double()


def chooser():
    return nn.Sequential(body(NUM_CLASSES), ml.models.TaskLogits(NUM_CLASSES))


def learner(kind: Any = ml.TOE, **options: Any) -> Any:
    own: dict[str, Any] = {} if kind is ml.TOE else {"inner_lr": INNER_LR, "inner_steps": 2}
    if kind is ml.FTML:
        own["support"] = 3
    return kind(chooser, CROSS_ENTROPY, **(SIZES | own | options))


def played(*learners: ml.Learner, start: int = 0, stop: int = 4) -> list[ml.Learner]:
    """Learners after some rounds, two reveals each, side by side where there are several."""
    streams = [stream(one.seed) for one in learners]
    for t in range(start, stop):
        for first in (0, 6):
            for one, tasks in zip(learners, streams, strict=True):
                task, part = tasks[t], slice(first, first + 6)
                if first == 0:
                    one.begin(task.name, classes=task.classes)
                one.observe(task.train.x[part], task.train.y[part], ids=task.ids[part], update=False)
            update_together(learners)
    return list(learners)


def assert_same(found, expected, rtol):
    for one, other in zip(found, expected, strict=True):
        assert one.step == other.step > 0
        for name, value in other.params.items():
            torch.testing.assert_close(one.params[name], value, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("kind", [ml.TOE, ml.FTL, ml.FTML])
def test_equals_the_slow_loop(kind):
    """Global labels, logits indexed in the open, one task at a time, torch's autograd and optimiser."""
    made = learner(kind)
    net, tasks = body(NUM_CLASSES), stream()
    params = {name: made.params[f"0.{name}"].clone().requires_grad_() for name, _ in net.named_parameters()}
    optimizer = torch.optim.Adam(params.values(), lr=SIZES["meta_lr"])
    class_of = dict(zip(tasks.data.x[:, 0].tolist(), tasks.data.labels.tolist(), strict=True))

    def loss_of(params, x, classes):
        """From the points themselves: what each is, and what it could be; no label is looked at."""
        target = torch.tensor([classes.index(class_of[value]) for value in x[:, 0].tolist()])
        return F.cross_entropy(functional_call(net, params, (x,))[:, classes], target, label_smoothing=0.1)

    def adapted(params, x, classes):
        for _ in range(2):
            found = torch.autograd.grad(loss_of(params, x, classes), list(params.values()), create_graph=True)
            params = {name: params[name] - INNER_LR * g for name, g in zip(params, found, strict=True)}
        return params

    updates = 0
    for t in range(4):
        task = tasks[t]
        made.begin(task.name, classes=task.classes)
        for first in (0, 6):
            part = slice(first, first + 6)
            made.observe(task.train.x[part], task.train.y[part], ids=task.ids[part])
            for _ in range(SIZES["meta_steps"]):
                which: Any = "past" if kind is ml.FTL else "all"
                draw = made.memory.draw(0, [updates], 4, 3 if kind is ml.FTML else 0, 6, which=which)
                if draw is None:
                    continue
                support, query = made.memory.gather(draw.at(0))
                losses = []
                for i in range(4):
                    # The order does not matter to a loss of global classes.
                    classes = sorted({class_of[value] for value in query.x[i, :, 0].tolist()})
                    assert len(classes) == WAYS
                    fast = adapted(params, support.x[i], classes) if kind is ml.FTML else params
                    losses.append(loss_of(fast, query.x[i], classes))
                optimizer.zero_grad()
                torch.stack(losses).mean().backward()
                optimizer.step()
                updates += 1
            for name, value in params.items():
                torch.testing.assert_close(made.params[f"0.{name}"], value.detach(), rtol=1e-9, atol=1e-11)
            used = params if kind is ml.TOE else adapted(params, task.train.x[: first + 6], list(task.classes))
            expected = functional_call(net, used, (task.test.x,))[:, list(task.classes)]
            torch.testing.assert_close(made.adapt(statistics="batch")(task.test.x), expected, rtol=1e-8, atol=1e-10)
    assert made.step == updates > 0


def test_the_net_of_a_task_has_its_classes():
    (made,) = played(learner())
    task = stream()[4]
    made.begin(task.name, classes=task.classes)
    net = made.adapt()  # no data of the task yet
    whole = body(NUM_CLASSES)
    whole.load_state_dict({name.removeprefix("0."): value for name, value in net.state_dict().items()})
    torch.testing.assert_close(made.adapt(statistics="batch")(task.test.x), whole(task.test.x)[:, list(task.classes)])
    assert net(task.test.x[0]).shape == (WAYS,)
    made.observe(task.train.x, task.train.y, ids=task.ids, update=False)
    known = made.adapt(statistics="task")(task.test.x)
    made.begin("again", classes=task.classes[::-1])
    made.observe(task.train.x, WAYS - 1 - task.train.y, ids=task.ids, update=False)
    torch.testing.assert_close(made.adapt(statistics="task")(task.test.x), known.flip(1))


def test_side_by_side_equals_alone():
    together = played(learner(seed=0), learner(seed=1))
    assert_same(together, [played(learner(seed=seed))[0] for seed in range(2)], 1e-9)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize("kind", [ml.TOE, ml.FTML])
def test_compiled_equals_eager(kind, monkeypatch):
    compiler = functools.partial(torch.compile, dynamic=False, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(compiled_module, "compile_whole", compiler)
    engine = Engine("compiled")
    found = played(*(learner(kind, seed=seed, engine=engine) for seed in range(2)))
    assert engine.mode == "compiled", "the engine fell back"
    assert_same(found, played(*(learner(kind, seed=seed) for seed in range(2))), 1e-9)
    torch.compiler.reset()


def test_saving_and_going_on_is_bit_identical(tmp_path):
    (whole,) = played(learner())
    (half,) = played(learner(), stop=2)
    half.save(tmp_path / "half.safetensors")
    again = ml.TOE.load(tmp_path / "half.safetensors", chooser, CROSS_ENTROPY)
    light = learner()
    preload(light, stream(), 2)
    light.load_state_dict(half.state_dict(data=False))
    x = stream()[3].test.x
    for one in (again, light):
        assert torch.equal(one.adapt()(x), half.adapt()(x))
        played(one, start=2)
        assert torch.equal(one.adapt()(x), whole.adapt()(x))
        assert all(torch.equal(one.params[name], value) for name, value in whole.params.items())


def test_the_hindsight_comparator_chooses_too():
    tasks = stream()
    with pytest.warns(UnconvergedWarning):
        found = hindsight(chooser, CROSS_ENTROPY, tasks, inner_steps=0, max_evaluations=5)
    net = body(NUM_CLASSES)
    net.load_state_dict({name.removeprefix("0."): value for name, value in found.params.items()})
    for value, task in zip(found.losses, (tasks[t] for t in range(len(tasks))), strict=True):
        expected = F.cross_entropy(net(task.test.x)[:, list(task.classes)], task.test.y)
        assert value == pytest.approx(expected.item())


def test_classes_without_an_output_are_refused():
    made = learner()
    for classes in ([0, 1, NUM_CLASSES], [-1, 0, 1]):
        with pytest.raises(ValueError, match=r"task 'far': classes must lie in 0\.\.11.*got \["):
            made.begin("far", classes=classes)
    assert (made.round, made.task) == (-1, None)
    narrow = ml.TOE(nn.Sequential(body(5), ml.models.TaskLogits(NUM_CLASSES)), CROSS_ENTROPY)
    narrow.begin("task", classes=[0, 1, 2])
    with pytest.raises(ValueError, match="the model fails on x"):
        narrow.observe(stream()[0].train.x, stream()[0].train.y)


def test_without_classes_all_logits_pass():
    made = learner()
    made.begin("all")
    x, labels = stream().data.x, stream().data.labels
    made.observe(torch.from_numpy(x), torch.from_numpy(labels))
    assert made.adapt()(torch.from_numpy(x)).shape == (len(x), NUM_CLASSES)


def test_it_learns_where_one_head_over_shuffled_labels_stays_at_chance():
    options: dict[str, Any] = SIZES | {"meta_steps": 20}
    accuracies = {}
    for name, model in (("chosen", chooser), ("one head", lambda: body(WAYS))):
        records = list(ml.play(ml.TOE(model, CROSS_ENTROPY, **options), stream(), reveal=12))
        accuracies[name] = np.mean([r.accuracy or 0.0 for r in records[-6:]])
    assert accuracies["chosen"] > 0.9
    assert 0.1 < accuracies["one head"] < 0.6  # chance is a third


def test_the_preset_has_an_output_a_class_and_records_five_ways():
    draw = rng("small cifar", 0)
    labels = np.tile(np.arange(94, 100), 10)
    images = draw.integers(256, size=(2, 60, 3, 32, 32), dtype=np.uint8)
    preset = PRESETS["cifar100"]("quick")
    made = preset.methods["toe"](preset.network, preset.loss, meta_steps=1, tasks_per_step=2)
    assert made.query == 25
    tasks = NWayStream(Labelled(images[0], labels, images[1], labels), per_class=10)
    records = list(ml.play(made, tasks, reveal=50, steps=preset.steps))
    assert made.step == 2
    assert [value.shape[0] for name, value in made.params.items() if name.endswith("head.bias")] == [100]
    assert made.adapt()(torch.from_numpy(images[1])).shape == (60, 5)
    assert all(r.accuracy is not None and r.loss < 3 for r in records)  # of 100 ways it would be 4.6
