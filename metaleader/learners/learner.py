"""The contract of all learners: begin, observe, update, adapt, state.

A subclass only defines, once, the objective of its updates, the tasks that they draw, and its adaptation.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self, overload

import torch
from torch import Tensor
from torch.nn import Module

from metaleader.distributed.shards import Sharding
from metaleader.engine.engine import Engine, Mode, engine_of
from metaleader.gradient.selection import Params
from metaleader.learners import prediction
from metaleader.learners.changes import Change
from metaleader.learners.checkpoint import load_learner, load_state, save_learner
from metaleader.learners.data import checked_folder, memory_by_class, memory_by_task, store
from metaleader.learners.definition import Definition, with_own_gradient
from metaleader.learners.locks import Locks
from metaleader.learners.many import inputs_by_name, predict_many
from metaleader.learners.optimizer import Rule, State, state_tree
from metaleader.learners.options import Configured, Model, initial_module, initial_params
from metaleader.learners.sharded import agree_on_learner
from metaleader.learners.together import update_together
from metaleader.losses import Loss, check_loss
from metaleader.memory.contract import Memory
from metaleader.nets.functional import Layout, Network, Statistics
from metaleader.system.machine import known_device
from metaleader.system.settings import keeps_settings
from metaleader.tasks import Tree, as_name, num_rows


class Learner(Configured, ABC):
    """The contract of all learners.

    Args:
        model: an `nn.Module`, whose weights are the initialisation, or a function that builds one, called under `seed`.
        loss: of (prediction, target), one value per datapoint or a scalar.
        device: where parameters and data are stored.
        engine: how updates run: "eager", "graphed", "compiled", "captured", an `Engine`, or "auto" for the fastest that
            pays for 50 calls of `observe`; the choice and its reason are logged.
        data_folder: a folder on the disk for the data, which is mapped into memory; None keeps it on the device.
        settings: the fields of `Options`: `meta_lr`, `meta_steps`, `tasks_per_step`, `query`, `optimizer`, `clip`,
            `weights`, `max_tasks`, `max_datapoints`, `max_bytes`, `reservoir`, `preprocess`, `seed`, `shards`.

    Attributes:
        options: the settings.
        network: the model and the loss as pure functions.
        memory: the data observed.
        state: parameters and optimiser state.
        skipped: the number of draws left out after updates that failed.
        round: t, from 0; -1 before the first `begin`.
        task: the name of the current task, or None.
        locks: for threads: `locks.changing` is held by calls that change the learner.
    """

    def __init__(
        self,
        model: Model,
        loss: Loss,
        *,
        device: str | torch.device = "cpu",
        engine: Mode | Engine = "auto",
        data_folder: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        check_loss(loss)
        self.locks = Locks()
        self.options = self.Options.parse(settings, type(self).__name__)
        self.model, self.loss, self.device = model, loss, known_device(device)
        self.sharding = Sharding(self.options.shards)
        self.network = Network(initial_module(model, self.options.seed, 0), loss, self.options.preprocess, self.device)
        self.data_folder = None if data_folder is None else checked_folder(data_folder)
        self.memory: Memory = memory_by_task(self)
        self.definition = with_own_gradient(self, self.define(), base=Learner)
        self.engine = engine_of(engine, self.options.meta_steps, self.device, *self.definition.work(self.options.query))
        params = self.definition.objective.params()
        if len({value.dtype for value in params.values()}) > 1:
            raise ValueError(f"parameters must be of one dtype, got {sorted({str(v.dtype) for v in params.values()})}")
        self.rule = Rule.of(self.options.optimizer, self.options.meta_lr, self.options.clip)
        self.state = State(self.layout.flat(params), {})
        self.round, self.skipped = -1, 0
        self.task: str | None = None
        if self.sharding.group.size > 1:
            agree_on_learner(self)

    @abstractmethod
    def define(self) -> Definition:
        """The definition of this kind of learner; called once, by the constructor."""

    def task_gradient(self, params: Params, support: Any, query: Any) -> tuple[Tensor, Params]:
        """The loss and meta-gradient of one task, in plain torch; override it for an algorithm of your own.

        `params` are tensors by name, `support` is the `Batch` to adapt on, and `query` the `Batch` to measure on. The
        result is the loss, a scalar, and one gradient per parameter, by name.

        The engine calls it for all tasks of an update and all learners side by side at once, by `torch.func.vmap`:
        write it with `torch.func.grad`. If vmap does not support it, it runs as a loop over tasks, with a warning. The
        learner must not be changed in it.
        """
        return self.definition.objective.one_task(params, support, query)

    def loss_fn(self, params: Params, batch: Any) -> Tensor:
        """The mean loss over the datapoints of a batch of one task, as a pure function of the parameters.

        It is for use in `task_gradient`, and cannot be overridden.
        """
        return self.network.loss_fn(params, batch)

    # The contract.

    @keeps_settings
    def begin(self, name: str, classes: Sequence[int] | None = None) -> None:
        """Begin round t with a new task; D_t is empty.

        Args:
            name: text or an integer. The same name again opens a new round for that task; see `adapt(task=)`.
            classes: for n-way tasks, the global class behind each label, in the order of the labels. Either all tasks
                of a learner have classes or none.
        """
        with self.locks.changing, self.locks.reading:
            memory = self.memory if classes is None else memory_by_class(self)
            state, t = self.state, self.round + 1
            if self.definition.restarts:
                flat = self.layout.flat(initial_params(self.model, self.options.seed, t, self.device))
                state = State(flat, {}, state.step, state.step, state.form)
            with Change([self]):
                memory.begin(as_name(name), classes, self.network.num_classes)
                vars(self).update(memory=memory, state=state, round=t, task=as_name(name))

    @keeps_settings
    def observe(
        self,
        x: Tree,
        y: Tree,
        *,
        task: str | None = None,
        ids: Sequence[int] | Tensor | None = None,
        update: bool = True,
    ) -> None:
        """Store datapoints of a task and meta-update; on an error the learner is as before the call.

        Args:
            x: inputs, one row per datapoint: a tensor, array or data frame, or a dict or tuple of them. float64 arrays
                are converted to the dtype of the model.
            y: targets, one row per datapoint; for n-way tasks, positions in the task's classes. For `squared_error` and
                a model with one output, y may have one dimension.
            task: a name: the data is added to all earlier data of this name; the open round stays as it is. No `begin`
                is needed. Draws use such a task from its second datapoint on. None is the current task.
            ids: for n-way tasks, one integer per datapoint that names it across tasks: one seen before is stored once.
            update: False only stores the data; call `update` later.
        """
        task = None if task is None else as_name(task)
        with self.locks.changing, Change([self]):
            store(self, x, y, task, ids, update)
            if update:
                self.update()

    @keeps_settings
    def forget(self, name: str) -> None:
        """Delete all data of a task for good; an open round of this name stays open, without data.

        What updates have learned from the data stays in the parameters. Files saved before keep the data. A name
        without data raises a ValueError.
        """
        with self.locks.changing, self.locks.reading:
            with Change([self]):
                self.memory.forget(as_name(name))
            self.memory.scrub()

    @keeps_settings
    def readmit(self, name: str) -> None:
        """Draw a task again that was set aside; see `set_aside`."""
        with self.locks.changing, self.locks.reading, Change([self]):
            self.memory.readmit(as_name(name))

    def update(self, steps: int | None = None) -> None:
        """Run `meta_steps` updates, or the given number, on the data observed.

        If a loss, a gradient or a parameter becomes not finite because of one task among others, that task is set
        aside, with a warning, and the updates are made without it. The open round is never set aside.

        Raises:
            ValueError: if the updates fail otherwise. The learner is then as before the call, but if it is not the
                fault of the open round, the next call draws other datapoints (`skipped`).
        """
        with self.locks.changing:
            update_together([self], steps)

    @overload
    def adapt(self, steps: int | None = None, statistics: Statistics = "task", task: str | None = None) -> Module: ...

    @overload
    def adapt(self, steps: Sequence[int], statistics: Statistics = "task", task: str | None = None) -> list[Module]: ...

    @keeps_settings
    @torch.no_grad()
    def adapt(
        self, steps: int | Sequence[int] | None = None, statistics: Statistics = "task", task: str | None = None
    ) -> Module | list[Module]:
        """A net adapted to all of D_t, for use on one row or many; without data, the initialisation.

        Threads may call it, `predict` and `predict_many` at the same time, also while another changes the learner.

        Args:
            steps: the number of gradient steps; None is the learner's own. Several numbers give a list of nets. With
                `adaptation=`, 0 gives the initialisation, and any other number the adapted net.
            statistics: of batch norm: "task" uses those of D_t, so that a prediction does not depend on the rows beside
                it; "batch" those of the rows that the net is called on, as in the paper.
            task: adapt to all data observed under this name, in rounds or by `observe(task=)`, instead of D_t.

        Raises:
            ValueError: for a name without data, or if the adapted net is not finite.
        """
        return prediction.adapt(self, steps, statistics, task)

    @keeps_settings
    @torch.no_grad()
    def predict(self, x: Tree, task: str | None = None, *, variance: bool = False) -> Any:
        """Predictions of the net adapted to a task, for rows of x; the learner is not changed.

        Args:
            x: inputs, one row per datapoint, as in `observe`.
            task: a name; None is the current task.
            variance: return the pair of predictions and their variances, with `adaptation=BayesianHead()`.
        """
        if variance and type(self).adapt is not Learner.adapt:
            raise ValueError(f"{type(self).__name__} overrides adapt, whose predictions have no known variance")
        return prediction.predict(self, x, task, variance, type(self).adapt is not Learner.adapt)

    @keeps_settings
    @torch.no_grad()
    def predict_many(self, xs: Mapping[str, Tree]) -> dict[str, Any]:
        """Predictions by name, for inputs by name of the task: those of `predict(x, task=name)`, up to rounding."""
        xs = inputs_by_name(xs)
        own = (type(self).adapt, type(self).predict) != (Learner.adapt, Learner.predict)
        return {name: self.predict(x, task=name) for name, x in xs.items()} if own else predict_many(self, xs)

    @property
    def layout(self) -> Layout:
        """The positions of the parameters in `state.flat`."""
        return self.definition.objective.layout

    @property
    def params(self) -> Params:
        """w_t, by name: the parameters that are learned, without those with requires_grad=False."""
        named = self.layout.named(self.state.flat)
        return {name: named[name] for name, _ in self.network.module.named_parameters()}

    @property
    def step(self) -> int:
        """The number of updates made so far."""
        return self.state.step

    @property
    def updates_per_reveal(self) -> int:
        """The number of updates at each `observe`."""
        return self.options.meta_steps * self.definition.updates_per_step

    @property
    def restarts(self) -> bool:
        """Whether every round starts from a new initialisation."""
        return self.definition.restarts

    @property
    def has_batch_norm(self) -> bool:
        """Whether the choice of statistics makes a difference."""
        return self.network.has_batch_norm

    @property
    def tasks(self) -> dict[str, int]:
        """The number of datapoints by name; for n-way tasks, which are stored by class, those of the open round."""
        with self.locks.reading:
            return self.memory.sizes()

    @property
    def set_aside(self) -> dict[str, str]:
        """The tasks that updates no longer draw because their data made an update fail, with the reason.

        Their data is kept. `observe(task=)` adds to it, `readmit` draws it again, `forget` deletes it.
        """
        with self.locks.reading:
            return self.memory.aside

    @property
    def num_datapoints(self) -> int:
        """The size of D_t."""
        data = self.memory.current() if self.task is not None else None
        return 0 if data is None else num_rows(data)

    @property
    def num_new(self) -> int:
        """The number of datapoints of D_t that no earlier task had; n-way tasks may repeat images."""
        return self.memory.num_new if self.task is not None else 0

    def chosen_classes(self) -> Tensor | None:
        """The classes of the current task, if the network chooses its outputs by them."""
        return None if self.network.num_classes is None else self.memory.current_classes()

    @keeps_settings
    def state_dict(self, data: bool = True) -> dict[str, Any]:
        """Everything that the learner's future depends on, as a tree of tensors and plain values.

        Args:
            data: False omits the observed datapoints; they must be observed again before `load_state_dict`.
        """
        with self.locks.changing:
            tree = state_tree(self.state, self.layout, self.rule.elementwise)
            tree |= {"skipped": self.skipped} if self.skipped else {}
            tree |= {"frozen": self.network.frozen_params()} if self.network.frozen else {}
            return {"round": self.round, "task": self.task} | tree | {"buffer": self.memory.state_dict(data)}

    @keeps_settings
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, bit for bit as the learner it was taken from.

        Raises:
            ValueError: if it is not the state of such a learner; the learner is then as before the call.
        """
        with self.locks.changing, self.locks.reading:
            load_state(self, state)

    @keeps_settings
    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the learner with its data and settings to one safetensors file, atomically."""
        save_learner(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model, loss: Loss, **callables: Any) -> Self:
        """Load a learner; continuing is bit-identical to not having stopped.

        Args:
            path: a file written by `save`.
            model: the same architecture; its weights are replaced.
            loss: the same loss.
            callables: `optimizer`, `weights` or `preprocess` if the saved learner had functions for them, and `device`
                and `engine`, which are not saved.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: for a truncated file, another learner or another model. If only the numbers show that model,
                loss or preprocess are not the saved ones, a warning is logged.
        """
        return load_learner(cls, path, model, loss, callables)
