"""What every learner shares: the contract (begin, observe, adapt, state_dict), memory, optimiser.

A learner is final; it says only which datapoints an update draws, which gradient it takes of them, and how it adapts.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, overload

import numpy as np
import torch
from torch import Tensor, nn

from metaleader.engine.engine import Engine, Mode
from metaleader.engine.objective import Adaptation, Objective, without_rates
from metaleader.gradient.inner import Params
from metaleader.learners.adapted import adapted_nets
from metaleader.learners.checkpoint import load_learner, load_state, save_learner
from metaleader.learners.optimizer import OptimizerFactory, Outer, Schedule
from metaleader.learners.options import Model, check_integer, initial_module
from metaleader.learners.update import update_together
from metaleader.losses import Loss
from metaleader.memory.by_class import ClassBuffer
from metaleader.memory.by_task import Draw, TaskBuffer, Weights
from metaleader.nets.functional import Network, Statistics, scale_uint8
from metaleader.system.machine import known_device
from metaleader.tasks import Batch, ClassBatch, Tree, check_alike, check_batch, num_rows, rng, to_device


class Learner(ABC):
    """The contract of all learners.

    Args:
        model: an `nn.Module`, whose weights are the initialisation, or a function that builds one, called under `seed`.
        loss: of (prediction, target), one value a datapoint or a scalar.
        meta_lr: the outer step size, or (from update, step size) pairs such as `[(0, 0.01), (5000, 0.001)]`.
        meta_steps: updates at each `observe`.
        tasks_per_step: tasks in one update.
        query: datapoints of each task that an update's loss is taken on.
        optimizer: "adam", "sgd" (momentum 0.9), or a function of (parameters, lr=...) such as `torch.optim.AdamW`.
        clip: the largest norm of a gradient; longer ones are scaled down.
        weights: nu^t, the distribution over tasks seen, such as `recency(10)`; uniform if None.
        max_tasks: how many tasks are kept, two or more, the open one among them: the newest, or those with the largest
            `weights`; a name that begins again is one task more. None keeps all, as in the paper, and tasks with
            `classes` need that.
        preprocess: applied to every x; by default scales uint8 to [0, 1].
        seed: of the initialisation and of all draws.
        device: where parameters and data live.
        engine: how updates are run: "eager", "compiled", "captured", or an `Engine`.
    """

    def __init__(
        self,
        model: Model,
        loss: Loss,
        *,
        meta_lr: Schedule = 1e-3,
        meta_steps: int = 10,
        tasks_per_step: int = 25,
        query: int = 10,
        optimizer: str | OptimizerFactory = "adam",
        clip: float | None = None,
        weights: Weights | None = None,
        max_tasks: int | None = None,
        preprocess: Callable[[Tree], Tree] | None = scale_uint8,
        seed: int = 0,
        device: str | torch.device = "cpu",
        engine: Mode | Engine = "eager",
    ) -> None:
        check_integer("meta_steps", meta_steps, 0)
        check_integer("tasks_per_step", tasks_per_step, 1)
        check_integer("query", query, 1)
        check_integer("seed", seed, 0)
        if not callable(loss):
            raise ValueError(
                f"loss must be a function of (prediction, target), as metaleader.losses.squared_error; got {loss!r}"
            )
        if weights is not None and not callable(weights):
            raise ValueError(
                f"weights must be a function of the number of tasks, as metaleader.recency(20); got {weights!r}"
            )
        self.loss = loss
        self.meta_steps = meta_steps
        self.tasks_per_step = tasks_per_step
        self.query = query
        self.clip = clip
        self.seed = seed
        self.device = known_device(device)
        self._model = model
        self._hyperparameters: dict[str, Any] = {
            "meta_lr": meta_lr if isinstance(meta_lr, int | float) else [list(pair) for pair in meta_lr],
            "meta_steps": meta_steps,
            "tasks_per_step": tasks_per_step,
            "query": query,
            "optimizer": optimizer,
            "clip": clip,
            "weights": weights,
            "max_tasks": max_tasks,
            "preprocess": preprocess,
            "seed": seed,
        }
        self._network = Network(initial_module(model, seed, 0), loss, preprocess)
        self._network.module.to(self.device)
        self._buffer: TaskBuffer | ClassBuffer = TaskBuffer(self.device, weights, max_tasks)
        self._engine = engine if isinstance(engine, Engine) else Engine(engine, device=self.device)
        self._minimise(Objective(self._network))
        self.round = -1
        self.task: str | None = None

    # What a learner is.

    @abstractmethod
    def _draw(self, steps: Sequence[int]) -> Draw | None:
        """What the updates with these numbers draw from the buffer."""

    @abstractmethod
    def _adaptation(self) -> Adaptation | None:
        """The update procedure, or None for a learner that is used as it is."""

    def _minimise(self, objective: Objective) -> None:
        """Set what updates minimise, from its beginning."""
        optimizer, meta_lr, clip = (self._hyperparameters[name] for name in ("optimizer", "meta_lr", "clip"))
        self._objective, self._outer = objective, Outer(objective.params(), optimizer, meta_lr, clip)

    def _on_begin(self) -> None:  # noqa: B027
        """Called when a round begins."""

    # The contract.

    def begin(self, name: str, classes: Sequence[int] | None = None) -> None:
        """Begin round t with a new task; D_t is empty.

        Args:
            name: a label; a name seen before still opens a new task, see `adapt(task=)`.
            classes: for n-way tasks, the global class behind each label, in the order of the labels. All tasks of a
                learner have classes, or none has.
        """
        if classes is None:
            if isinstance(self._buffer, ClassBuffer):
                raise ValueError(f"task {name!r} has no classes, earlier tasks have; pass begin(name, classes=[...])")
            self._buffer.begin(str(name))
        else:
            if self._hyperparameters["max_tasks"] is not None:
                raise ValueError(f"task {name!r} has classes, whose images are kept by class: leave max_tasks at None")
            if isinstance(self._buffer, TaskBuffer) and self.task is not None:
                raise ValueError(f"task {name!r} has classes, earlier tasks have none; use a new learner")
            buffer = self._buffer
            if not isinstance(buffer, ClassBuffer):
                buffer = ClassBuffer(self.device, buffer.weights)
            buffer.begin(str(name), classes, self._network.num_classes)
            self._buffer = buffer
        self.round += 1
        self.task = str(name)
        self._on_begin()

    def observe(self, x: Tree, y: Tree, *, ids: Sequence[int] | Tensor | None = None, update: bool = True) -> None:
        """Keep datapoints of the current task and meta-update; on an error the learner is as before the call.

        Args:
            x: inputs, one row a datapoint: a tensor, or a dict or tuple of tensors.
            y: targets, one row a datapoint; for n-way tasks, positions in the task's classes.
            ids: for n-way tasks, one integer a datapoint that names it across tasks: one seen before is kept once.
            update: False only keeps the data; call `update` later.
        """
        if self.task is None:
            raise ValueError("observe before begin: call begin(name) to open a task first")
        batch = to_device(check_batch(Batch(x, y), "observe"), self.device)
        if self._buffer.store.data is not None:
            check_alike(batch, self._buffer.store.data, "observe")
        self._network.check(self.params, batch, "observe")
        if ids is not None and isinstance(self._buffer, TaskBuffer):
            raise ValueError("observe: ids belong to n-way tasks; open the task with begin(name, classes=[...])")
        mark = self._buffer.mark()
        try:
            if isinstance(self._buffer, ClassBuffer):
                self._buffer.append(batch, ids)
            else:
                self._buffer.append(batch)
            if update:
                self.update()
        except BaseException:
            self._buffer.rollback(mark)
            raise

    def update(self, steps: int | None = None) -> None:
        """Run `meta_steps` updates, or the given number, on what was observed.

        Raises:
            ValueError: when a loss or gradient is not finite; the learner is then as before the call.
        """
        update_together([self], steps)

    @overload
    def adapt(
        self, steps: int | None = None, statistics: Statistics = "task", task: str | None = None
    ) -> nn.Module: ...

    @overload
    def adapt(
        self, steps: Sequence[int], statistics: Statistics = "task", task: str | None = None
    ) -> list[nn.Module]: ...

    def adapt(
        self, steps: int | Sequence[int] | None = None, statistics: Statistics = "task", task: str | None = None
    ) -> nn.Module | list[nn.Module]:
        """A net adapted to all of D_t, for use on one row or many; the learner stays as it is.

        Before any data of the task, the net is the initialisation.

        Args:
            steps: how many gradient steps; the learner's own number if None. Several numbers give a list of nets.
            statistics: what batch norm divides by: "task" takes D_t's statistics, so that a prediction does not depend
                on the rows beside it; "batch" those of the rows it is called on, as in the paper.
            task: adapt to all that was observed under this name, in one round or in several, and is kept, instead of
                D_t.
        """
        if isinstance(steps, Sequence):
            return adapted_nets(self, steps, statistics, task)
        return adapted_nets(self, [steps], statistics, task)[0]

    @property
    def params(self) -> Params:
        """w_t, by name."""
        return without_rates(self._outer.params)

    @property
    def step(self) -> int:
        """Updates made so far."""
        return self._outer.step

    @property
    def updates_per_reveal(self) -> int:
        """Updates at each `observe`."""
        return self._num_updates(self.meta_steps)

    @property
    def has_batch_norm(self) -> bool:
        """Whether the choice of statistics makes a difference."""
        return self._network.has_batch_norm

    @property
    def num_datapoints(self) -> int:
        """The size of D_t."""
        data = self._buffer.current() if self.task is not None else None
        return 0 if data is None else num_rows(data)

    @property
    def num_new(self) -> int:
        """How many datapoints of D_t no earlier task had: less than all where an n-way task shows known images."""
        return self._buffer.num_new if isinstance(self._buffer, ClassBuffer) else self.num_datapoints

    # State.

    def state_dict(self, data: bool = True) -> dict[str, Any]:
        """Everything that the learner's future depends on, as a tree of tensors and plain values.

        Args:
            data: False leaves the observed datapoints out; they must be observed again before `load_state_dict`.
        """
        state = {"round": self.round, "task": self.task}
        return state | self._outer.state_dict() | {"buffer": self._buffer.state_dict(data)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: bit for bit as the learner it was taken from.

        Raises:
            ValueError: when it is not the state of such a learner; the learner is then as before the call.
        """
        load_state(self, state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the learner with its data and hyperparameters to one safetensors file, atomically."""
        save_learner(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model, loss: Loss, **callables: Any) -> Self:
        """Load a learner; continuing is bit-identical to not having stopped.

        Args:
            path: what `save` wrote.
            model: the same architecture; its weights are replaced.
            loss: the same loss.
            callables: `optimizer`, `weights` or `preprocess` where the saved learner had functions for them, and
                `device` and `engine`, which are not saved.

        Raises:
            FileNotFoundError: when there is no such file.
            ValueError: for a truncated file, another learner or another model. Where only the numbers tell that model,
                loss or preprocess are others than when it was saved, there is a warning.
        """
        return load_learner(cls, path, model, loss, callables)

    # Inside.

    def _num_updates(self, meta_steps: int) -> int:
        return meta_steps

    def _gather(self, draw: Draw) -> tuple[Batch | ClassBatch, Batch | ClassBatch]:
        """Support and query batches of one step's draw, with the tasks' classes where the network chooses by them."""
        support, query = self._buffer.gather(draw)
        if self._network.num_classes is None or draw.classes is None:
            return support, query
        return ClassBatch(*support, draw.classes), ClassBatch(*query, draw.classes)

    def _classes(self) -> Tensor | None:
        """The classes of the open task, where the network chooses by them."""
        if self._network.num_classes is None or not isinstance(self._buffer, ClassBuffer):
            return None
        return torch.tensor(self._buffer.ways, device=self.device)

    def _where(self) -> str:
        return f"round {self.round} (task {self.task!r}, {self.num_datapoints} datapoints)"

    def _what_to_lower(self) -> str:
        procedure = self._adaptation()
        inner = f" or inner_lr ({procedure.lr or 'learned'})" if procedure else ""
        return f"meta_lr ({self._outer.lr(self.step)}){inner}"

    def _noise(self, numbers: Sequence[int], num_tasks: int) -> Tensor | None:
        if not self._network.has_dropout:
            return None
        shape = (self._objective.inner_steps + 1, num_tasks)
        drawn = [rng("dropout", self.seed, n).integers(2**31, size=shape) for n in numbers]
        return torch.from_numpy(np.stack(drawn)).to(self.device)
