"""Small sessions, and the plain learner that a journal describes."""

import torch

from metaleader import losses, models
from metaleader.learners import FTML, BayesianHead
from metaleader.live.calls import Codec, Observe, Readmit, State, Update
from metaleader.live.checkpoints import decode
from metaleader.live.journal import Journal

ROWS = 3


def make(**settings):
    model = lambda: models.mlp(2, 1, (6,))  # noqa: E731
    sizes = {"inner_lr": 0.01, "inner_steps": 2, "meta_steps": 2, "tasks_per_step": 3, "support": 2, "query": 2}
    return FTML(model, losses.squared_error, **{**sizes, **settings})


def make_head():
    """A learner with a Bayesian head."""
    model = lambda: models.mlp(2, 1, (6,))  # noqa: E731
    head = BayesianHead()
    return FTML(model, losses.squared_error, adaptation=head, meta_steps=2, tasks_per_step=3, support=2, query=2)


def make_sizes():
    """A learner whose support sets have several sizes."""
    return make(support=(1, 2))


def batch(i, rows=ROWS):
    """Datapoints that depend on a number alone."""
    generator = torch.Generator().manual_seed(i)
    return torch.randn(rows, 2, generator=generator), torch.randn(rows, 1, generator=generator)


def calls(folder):
    """The calls of a closed folder, in order."""
    journal, codec = Journal(folder), Codec()
    found = [codec.decode(content) for _, content in journal.read()]
    journal.close()
    return [call for call in found if call is not None]


def plain_learner(folder, make=make):
    """A learner that makes the calls of a closed folder by itself, one after the other."""
    learner, data = make(), []
    begun = False
    for call in calls(folder):
        if isinstance(call, State):
            state = decode(call.tree, "")["learner"]
            stored = {name: torch.cat([getattr(one, name) for one in data]) for name in "xy"} if data else None
            learner.load_state_dict({**state, "buffer": {**state["buffer"], "data": stored}})
            begun = True
        elif isinstance(call, Observe) and not begun:
            data.append(call)
        elif isinstance(call, Observe):
            learner.observe(call.x, call.y, task=call.task, update=call.updates == "now")
        elif isinstance(call, Update):
            assert learner.step == call.step
            if call.exclusive or not fails(learner, call.steps, make):
                learner.update(call.steps)
        elif isinstance(call, Readmit):
            learner.readmit(call.task)
    return learner


def fails(learner, steps, make):
    """Whether updates fail; they are made by a copy."""
    copied = make()
    copied.load_state_dict(learner.state_dict())
    before = copied.set_aside, copied.skipped
    try:
        copied.update(steps)
    except ValueError:
        return True
    return (copied.set_aside, copied.skipped) != before


def same_state(learner, other):
    """Whether two learners have the same state, to the bit."""
    return differences(learner.state_dict(), other.state_dict(), "") == []


def differences(a, b, path):
    if isinstance(a, dict):
        keys = [f"{path}: {sorted(a)} and {sorted(b)}"] if a.keys() != b.keys() else []
        return keys + [d for name in a.keys() & b.keys() for d in differences(a[name], b[name], f"{path}/{name}")]
    if isinstance(a, list | tuple):
        return (
            [] if len(a) == len(b) and not any(differences(x, y, path) for x, y in zip(a, b, strict=True)) else [path]
        )
    equal = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    return [] if equal else [path]
