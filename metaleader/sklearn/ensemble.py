"""An ensemble of learners with closed-form heads, combined by their error on held-out groups.

Members are `FTML` learners with `BayesianHead`: a network whose last layer is adapted, a linear model, or a network
with an offset per group. Some groups are held out from training. They choose, for every learner, when to stop and how
much to adapt (a factor of the prior covariance), and the weights of the members. For classes, the last two
members are a random forest and boosted trees. Held-out groups choose how certain they are, by a temperature each;
without such groups they have no weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from metaleader.engine.engine import Engine
from metaleader.learners import FTML, BayesianHead, update_together
from metaleader.losses import squared_error
from metaleader.sklearn.trees import ClassTrees
from metaleader.tasks import Batch

# Held-out groups are predicted from this many of their datapoints, and need two more to be measured on. The second
# number is for classes in data whose groups are smaller.
_SHOTS = (10, 5)
_MEASUREMENTS = 30
_WARM_UP, _LAST_LR = 0.3, 0.05
# The factors of the prior covariance that are tried: from full adaptation to nearly none
_TEMPERS = (1.0, 0.3, 0.1, 0.03, 0.01)
# Noise and outliers differ between groups.
_DOF = 4.0
# The weights of the members are drawn towards weights known beforehand, as by this many held-out groups. For classes,
# they are those of the forest and the boosted trees below, and the learners share the rest; for regression, those of
# 1 / error ** 8, equal for members of about the same error.
_STRENGTH, _POWER = 2.0, 8
_TREES = (0.2, 0.6)
# The number of members from which two are trees
_WITH_TREES = 4
# Boosted trees are too certain: the logarithms of the probabilities are divided by one of these.
_TEMPERATURES = (0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0)


class _Net(nn.Module):
    """A multilayer perceptron beside the inputs themselves, under one linear layer."""

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int]) -> None:
        super().__init__()
        widths = [inputs, *hidden]
        layers = [layer for pair in zip(widths, hidden, strict=False) for layer in (nn.Linear(*pair), nn.SiLU())]
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(inputs + (hidden[-1] if hidden else 0), outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Predictions for rows of x."""
        return self.head(torch.cat([x, self.hidden(x)], -1) if len(self.hidden) else x)


class Ensemble:
    """Members that learn from groups of rows; rows are float32 and standardised.

    Args:
        loss: `squared_error` or `cross_entropy`.
        features: the number of features.
        outputs: the number of outputs.
        hidden: the widths of the hidden layers of the members that have any.
        members: the number of members.
        updates: the number of meta-updates of `train`.
        lr: the largest outer step size.
        seed: of the initialisations, the draws and the held-out groups.
        width: datapoints per task of an update.
        tasks: tasks per update.

    Attributes:
        weights: the weight of each member, (members,).
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        features: int,
        outputs: int,
        hidden: Sequence[int],
        members: int,
        updates: int,
        lr: float,
        seed: int,
        width: int,
        tasks: int,
    ) -> None:
        self._updates, self._seed, self._shots = updates, seed, _SHOTS[0]
        self._regression, self._outputs = loss is squared_error, outputs
        has_trees = not self._regression and bool(hidden) and members >= _WITH_TREES
        self._temperatures = torch.ones(len(_TREES) if has_trees else 0, dtype=torch.float64)
        self._trees: ClassTrees | None = None
        engine, kinds = Engine("eager"), self._member_kinds(tuple(hidden), members - len(self._temperatures))
        self._learners = [
            FTML(
                lambda widths=widths: _Net(features, outputs, widths),
                loss,
                adaptation=head,
                support=max(1, width // 2),
                query=max(1, width - width // 2),
                tasks_per_step=tasks,
                meta_lr=_schedule(updates, lr),
                seed=seed * 1000 + r,
                engine=engine,
            )
            for r, (widths, head) in enumerate(kinds)
        ]
        self._kinds = [
            [learner for learner, other in zip(self._learners, kinds, strict=True) if other == kind]
            for kind in dict.fromkeys(kinds)
        ]
        self.weights = torch.full((members,), 1 / len(kinds), dtype=torch.float64)
        self.weights[len(kinds) :] = 0

    def _member_kinds(self, hidden: tuple[int, ...], members: int) -> list[tuple[tuple[int, ...], BayesianHead]]:
        """The hidden layers and the head of each learner: the kinds in turn."""
        dof = _DOF if self._regression else None
        head = BayesianHead(dof=dof)
        if not hidden:
            return [((), head)] * members
        offset = BayesianHead(scale=0.3 if self._regression else 3.0, rank=0, dof=dof, only="bias")
        kinds = [(hidden, head), (hidden, offset), ((), head), (hidden, offset)]
        kinds = kinds if self._regression else [kinds[0], kinds[2], kinds[1]]
        return list(itertools.islice(itertools.cycle(kinds), members))

    def train(self, batches: Mapping[str, Batch], validation: float) -> None:
        """Train all members on all groups but a fraction, and choose by that fraction; then add its data."""
        names: list[str] = []
        for shots in _SHOTS[:1] if self._regression else _SHOTS:
            self._shots = shots
            eligible = sorted(name for name, batch in batches.items() if len(batch.y) >= shots + 2)
            order = np.random.default_rng([self._seed, len(eligible)]).permutation(len(eligible))
            names = [eligible[i] for i in sorted(order[: int(validation * len(eligible))])]
            if names:
                break
        held = [batches[name] for name in names]
        self.add({name: batch for name, batch in batches.items() if name not in names}, updates=0)
        best: list[tuple[float, Any]] = [(math.inf, learner.state) for learner in self._learners]
        step = max(1, self._updates // _MEASUREMENTS)
        for first in range(0, self._updates, step):
            self._update(min(step, self._updates - first))
            for r, learner in enumerate(self._learners):
                error = self._error(learner, held) if held else -first
                if error < best[r][0]:
                    best[r] = (error, learner.state)
        for learner, (_, state) in zip(self._learners, best, strict=True):
            learner.state = state._replace(step=self._updates)  # members are updated side by side later
        if held:
            for learner in self._learners:
                self._temper(learner, held)
            self.weights = self._best_weights(held)
        self.add(dict(zip(names, held, strict=True)), updates=0)

    def add(self, batches: Mapping[str, Batch], updates: int) -> None:
        """Store datapoints of any groups and update."""
        for name, batch in batches.items():
            for learner in self._learners:
                learner.observe(*batch, task=name, update=False)
        self._trees = None
        self._update(updates)

    def _update(self, steps: int) -> None:
        for kind in self._kinds if steps else ():
            update_together(kind, steps)

    @property
    def tasks(self) -> Set[str]:
        """The names of the groups that have data."""
        return self._learners[0].tasks.keys()

    @torch.no_grad()
    def outputs(self, x: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """The outputs of each member, (members, rows, outputs); groups without data are predicted by the prior.

        Args:
            x: inputs.
            rows: the rows of each group.
        """
        results = []
        for learner in self._learners:
            known = learner.tasks
            output = learner.network.predict(learner.layout.named(learner.state.flat), x)
            many = learner.predict_many({name: x[index] for name, index in rows.items() if name in known})
            for name, prediction in many.items():
                output[rows[name]] = prediction
            results.append(output.double())
        num = len(self._temperatures)
        if num and self.weights[-num:].sum() > 0:
            self._trees = self._trees or self._trees_with({})
            results += self._trees.outputs(x, rows) / self._temperatures[:, None, None]
        else:
            results += [torch.zeros_like(results[0])] * num
        return torch.stack(results)

    def _trees_with(self, batches: Mapping[str, Batch]) -> ClassTrees:
        """Trees of the data of all groups, and of groups that the learners do not have."""
        lead = self._learners[0]
        stored = {name: data for name in lead.tasks if (data := lead.memory.named(name)) is not None}
        return ClassTrees(stored | dict(batches), self._outputs, self._seed)

    @torch.no_grad()
    def variances(self, x: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """The predictive variance of each member, (members, rows)."""
        result = torch.zeros(len(self._learners), len(x), dtype=torch.float64)
        for r, learner in enumerate(self._learners):
            params, known = learner.layout.named(learner.state.flat), learner.tasks
            for name, index in rows.items():
                data = learner.memory.named(name) if name in known else None
                result[r, index] = _head(learner).variance(learner.network, params, data, x[index])[:, 0].double()
        return result

    def state(self) -> dict[str, Any]:
        """All that training has changed."""
        learners = [learner.state_dict() for learner in self._learners]
        return {"weights": self.weights, "temperatures": self._temperatures, "learners": learners}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self.weights, self._temperatures, self._trees = state["weights"], state["temperatures"], None
        for learner, saved in zip(self._learners, state["learners"], strict=True):
            learner.load_state_dict(saved)

    @torch.no_grad()
    def _predicted(self, learner: FTML, held: Sequence[Batch]) -> tuple[Tensor, Tensor, Tensor]:
        """Predictions, targets and weights of held-out rows, each group predicted from its first datapoints.

        The weights of the rows of a group sum to one.
        """
        params, longest = learner.layout.named(learner.state.flat), max(len(batch.y) for batch in held)
        shots = tree_map(lambda *leaves: torch.stack([leaf[: self._shots] for leaf in leaves]), *held)
        rest = [torch.arange(self._shots, longest) % len(batch.y) for batch in held]
        is_row = torch.stack([torch.arange(self._shots, longest) < len(batch.y) for batch in held])
        x = torch.stack([batch.x[index] for batch, index in zip(held, rest, strict=True)])
        y = torch.stack([batch.y[index] for batch, index in zip(held, rest, strict=True)])

        def predict(data: Batch, x: Tensor) -> Tensor:
            return learner.network.predict(params | _head(learner)(learner.network, params, data), x)

        shares = (is_row / is_row.sum(1, keepdim=True))[is_row]
        return torch.func.vmap(predict)(Batch(*shots), x)[is_row].double(), y[is_row], shares.double() / len(held)

    def _predicted_by_trees(self, held: Sequence[Batch]) -> Tensor:
        """Predictions of the rows of `_predicted`, by trees that have the first datapoints of held-out groups."""
        trees = self._trees_with({f"held {i}": Batch(*(leaf[: self._shots] for leaf in b)) for i, b in enumerate(held)})
        x = [batch.x[self._shots :] for batch in held]
        ends = np.cumsum([0, *map(len, x)])
        rows = {f"held {i}": torch.arange(ends[i], ends[i + 1]) for i in range(len(held))}
        return trees.outputs(torch.cat(x), rows)

    def _error(self, learner: FTML, held: Sequence[Batch]) -> float:
        """The mean loss on held-out groups."""
        prediction, y, shares = self._predicted(learner, held)
        return float((learner.loss(prediction, y) * shares).sum())

    def _temper(self, learner: FTML, held: Sequence[Batch]) -> None:
        """Multiply the prior covariance by the factor with the smallest error on held-out groups."""
        before, results = learner.state, []
        for factor in _TEMPERS:
            params = _head(learner).tempered(learner.layout.named(before.flat), factor)
            learner.state = before._replace(flat=learner.layout.flat(params))
            results.append((self._error(learner, held), learner.state))
        learner.state = min(results, key=lambda pair: pair[0])[1]

    def _best_weights(self, held: Sequence[Batch]) -> Tensor:
        """Weights of the members with the smallest error on held-out groups, drawn towards those known beforehand."""
        triples = [self._predicted(learner, held) for learner in self._learners]
        predictions, (_, y, shares) = torch.stack([triple[0] for triple in triples]), triples[0]
        if len(self._temperatures):
            by_trees = self._predicted_by_trees(held)
            self._temperatures = torch.stack([_best_temperature(member, y, shares) for member in by_trees])
            predictions = torch.cat([predictions, by_trees / self._temperatures[:, None, None]])
        num, strength = len(predictions), _STRENGTH / len(held)
        if self._regression:
            scale = shares.sqrt()
            matrix, target = (predictions[..., 0] * scale).mT.numpy(), (y[:, 0].double() * scale).numpy()
            errors = ((matrix - target[:, None]) ** 2).sum(0) + 1e-12
            known = (errors.min() / errors) ** _POWER
            known = known / known.sum()
            spread = math.sqrt(strength * float(known @ errors))
            rows = [matrix, np.eye(num) * spread, np.full((1, num), 1e3 * np.abs(target).sum())]
            targets = [target, known * spread, [1e3 * np.abs(target).sum()]]
            found, _ = scipy.optimize.nnls(np.concatenate(rows), np.concatenate(targets))
            # Targets that are all zero, as with a constant y, choose no member.
            return torch.from_numpy(found / found.sum()) if found.sum() > 0 else self.weights
        likelihoods = torch.softmax(predictions, -1).gather(-1, y.expand(num, -1)[..., None])[..., 0]
        trees = torch.tensor(_TREES[: len(self._temperatures)], dtype=torch.float64)
        num_learners = len(self._learners)
        known = torch.cat([torch.full((num_learners,), (1 - float(trees.sum())) / num_learners), trees])
        weights = known
        for _ in range(200):  # expectation maximisation of a mixture
            members = likelihoods * weights[:, None]
            weights = (members / members.sum(0) * shares).sum(1) + strength * known
            weights = weights / weights.sum()
        return weights


def _best_temperature(logits: Tensor, y: Tensor, shares: Tensor) -> Tensor:
    """The temperature with the smallest mean loss."""
    losses = [float(-torch.log_softmax(logits / t, -1).gather(-1, y[:, None])[:, 0] @ shares) for t in _TEMPERATURES]
    return torch.tensor(_TEMPERATURES[int(np.argmin(losses))], dtype=torch.float64)


def _head(learner: FTML) -> BayesianHead:
    head = learner.options.adaptation
    assert isinstance(head, BayesianHead)
    return head


def _schedule(updates: int, lr: float) -> list[tuple[int, float]]:
    """Step sizes that rise and then fall, in at most 50 steps."""
    pairs = {}
    for i in range(50):
        at = i / 50
        rise = at / _WARM_UP if at < _WARM_UP else (1 + math.cos(math.pi * (at - _WARM_UP) / (1 - _WARM_UP))) / 2
        pairs[int(updates * at)] = lr * max(rise, _LAST_LR)
    return sorted(pairs.items())
