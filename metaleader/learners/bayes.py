"""Adaptation in closed form: a Bayesian linear head over the features of a network, with a learned prior.

The last linear layer has weights w ~ N(m, K) for each output, K = diag(s^2) + U U'. The prior mean m is the layer's own
weights, and s, U and the noise are learned with the network. With D features (the bias is a constant one), n datapoints
and L = [diag(s), U], the posterior mean is

    w = m + L Z' (I + Z Z')^-1 r,    Z = phi L / sigma, row by row,    r = (y - phi m) / sigma

and the predictive variance at features phi* is sigma^2 + |a|^2 - a' Z' (I + Z Z')^-1 Z a with a = L' phi*. If n exceeds
the number of columns of L, the equal form with Z' Z is solved instead. Without hidden layers this is mixed-effects
regression. With `only="bias"` K is zero but for the bias: one network for all tasks and a shrunk offset per task.

For regression, updates maximise the evidence of a task's datapoints, which is the sum of the log-likelihoods of
predicting each datapoint from those before it. With `dof`, the variances of the noise and of the prior are those of the
task times an unknown factor per task, of inverse gamma distribution (normal-inverse-gamma, still in closed form): the
evidence is that of a multivariate t distribution, in which noisy tasks and outliers weigh less. The posterior mean is
the same, and the variance grows with the residuals of the task.

For classification, labels become Gaussian targets of the logits with a known variance each, the log-normal
approximation of a Dirichlet distribution (Milios et al. 2018), and updates minimise the cross-entropy of the query set
after adaptation to 0, 1, 2, 4, ... datapoints of the support set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from metaleader.engine.objective import Adaptation
from metaleader.gradient.selection import Params
from metaleader.losses import squared_error, takes_labels, unsmoothed
from metaleader.nets.functional import Network
from metaleader.tasks import WeightedBatch

_SCALE, _FACTOR, _NOISE = "prior log scale", "prior factor", "log noise"
# Data without noise would otherwise lead to systems that float32 cannot solve.
_MIN_NOISE = 1e-3


@dataclass(frozen=True)
class BayesianHead(Adaptation):
    """Adapts the last linear layer of a network in closed form: `ml.FTML(..., adaptation=ml.BayesianHead())`.

    The loss must be `squared_error` or `cross_entropy`. Inputs and targets should be standardised.

    Attributes:
        scale: the initial standard deviation of a weight under the prior, times the square root of the number of
            features; None is 1 for regression and 5 for classification.
        noise: the initial standard deviation of the noise, for classification the initial concentration of the
            Dirichlet distribution; None is 0.5 and 0.01.
        rank: the number of columns of U.
        only: which weights differ between tasks: None for all of the layer, or "bias" for an offset of each output.
        dof: the degrees of freedom of the factor of each task, above 2, for regression; None is infinitely many, one
            noise for all tasks.
    """

    takes_weights = True

    scale: float | None = None
    noise: float | None = None
    rank: int = 2
    dof: float | None = None
    only: str | None = None

    def __post_init__(self) -> None:
        for name in ("scale", "noise"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive, got {value}")
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0:
            raise ValueError(f"rank must be an integer of at least 0, got {self.rank!r}")
        if self.dof is not None and not 2 < self.dof < math.inf:
            raise ValueError(f"dof must be a number above 2, or None; got {self.dof}")
        if self.only not in (None, "bias"):
            raise ValueError(f'only must be "bias", or None for all weights of the last layer; got {self.only!r}')

    def check(self, network: Network) -> None:
        """Reject a network whose last layer is not linear, and losses without a likelihood."""
        _, layer = network.last_linear()
        if not takes_labels(network.loss) and unsmoothed(network.loss) is not squared_error:
            raise ValueError(
                "BayesianHead needs the loss metaleader.losses.squared_error or cross_entropy, whose likelihood it"
                f" knows; got {network.loss!r}"
            )
        if self.dof is not None and takes_labels(network.loss):
            raise ValueError(f"dof={self.dof} is for regression; with cross_entropy, leave dof=None")
        if self.only == "bias" and layer.bias is None:
            raise ValueError('only="bias" needs a last linear layer with a bias')
        if network.num_classes is not None:
            raise ValueError("BayesianHead does not support TaskLogits; use a head with one output per label of a task")

    def check_data(self, network: Network, params: Params, batch: Any) -> None:
        """Reject a network whose output is not that of its last linear layer."""
        phi, (mean, _) = self._features(network, params, batch.x), self._prior(network, params)
        expected = network.predict(params, batch.x)
        actual = phi @ mean if phi.ndim == 2 else None
        if actual is None or actual.shape != expected.shape or not torch.allclose(actual, expected, 1e-3, 1e-4):
            raise ValueError(
                "BayesianHead needs a network that returns the output of its last linear layer, one row per datapoint"
            )

    def init(self, network: Network) -> Params:
        """The parameters of the prior and of the noise."""
        _, layer = network.last_linear()
        size, outputs = layer.in_features + int(layer.bias is not None), layer.out_features
        size = size if self.only is None else 1
        like = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        labels = takes_labels(network.loss)
        scale = (self.scale or (5.0 if labels else 1.0)) / math.sqrt(size)
        noise = self.noise or (0.01 if labels else 0.5)
        generator = torch.Generator().manual_seed(0)
        # Not zero, where the gradient of U vanishes.
        factor = torch.randn(size, self.rank, generator=generator) * 0.1 * scale
        return {
            _SCALE: torch.full((size,), math.log(scale), **like),
            _FACTOR: factor.to(**like),
            _NOISE: torch.full((1 if labels else outputs,), math.log(noise), **like),
        }

    def __call__(self, network: Network, params: Params, data: Any) -> Params:
        """The last layer with the posterior mean of its weights."""
        targets, noise = self._targets(network, params, data.y)
        phi = self._features(network, params, data.x)
        weights = self._posterior(network, params, phi, targets, noise, _counted(data))
        name, layer = network.last_linear()
        if layer.bias is None:
            return {f"{name}weight": weights.mT}
        return {f"{name}weight": weights[:-1].mT, f"{name}bias": weights[-1]}

    def loss(self, network: Network, params: Params, support: Any, query: Any) -> Tensor:
        """The negative log evidence per datapoint, or the mean cross-entropy over sizes of the support set.

        A datapoint that is repeated to fill a set counts once.
        """
        phi, phi_query = (self._features(network, params, batch.x) for batch in (support, query))
        targets, noise = self._targets(network, params, support.y)
        counted, counted_query = _counted(support), _counted(query)
        if not takes_labels(network.loss):
            joint, weights = torch.cat([targets, query.y]), torch.cat([counted, counted_query])
            return self._negative_evidence(network, params, torch.cat([phi, phi_query]), joint, weights)
        sizes = [0, *(2**i for i in range(len(phi).bit_length()) if 2**i < len(phi)), len(phi)]
        losses = []
        for size in sizes:
            weights = self._posterior(network, params, phi[:size], targets[:size], noise[:size], counted[:size])
            values = network.loss(phi_query @ weights, query.y)
            losses.append((values * counted_query).sum() / counted_query.sum().clamp(min=1))
        return torch.stack(losses).mean()

    def variance(self, network: Network, params: Params, data: Any | None, x: Any) -> Tensor:
        """The predictive variance of each output at x, the noise included."""
        if takes_labels(network.loss):
            raise ValueError("variance=True is for regression; for classes, take the softmax of the predictions")
        noise, (_, factor) = self._noise_variance(params), self._prior(network, params)
        at = self._features(network, params, x, None if data is None else data.x) @ factor
        prior = at.square().sum(-1, keepdim=True) + noise
        if data is None:
            return prior if self.dof is None else prior * (self.dof / (self.dof - 2))
        phi = self._features(network, params, data.x)
        whitened = (phi @ factor) / noise.sqrt()[:, None, None]
        # Rounding must not give less than the noise.
        variance = torch.maximum(prior - (at.mT * _shrink(whitened, whitened @ at.mT)).sum(-2).mT, noise)
        if self.dof is None:
            return variance
        residuals = ((data.y - phi @ self._prior(network, params)[0]) / noise.sqrt()).mT[..., None]
        squares = (residuals * (residuals - whitened @ _shrink(whitened, residuals))).sum((-2, -1)).clamp(min=0)
        return variance * ((self.dof + squares) / (self.dof + len(phi) - 2))

    def tempered(self, params: Params, factor: float) -> Params:
        """Parameters whose prior covariance is multiplied by a factor: below 1, tasks are adapted less."""
        scaled = {_SCALE: params[_SCALE] + math.log(factor) / 2, _FACTOR: params[_FACTOR] * math.sqrt(factor)}
        return params | scaled

    def _features(self, network: Network, params: Params, x: Any, statistics_of: Any = None) -> Tensor:
        """The inputs of the last layer, (rows, D), with a column of ones if the layer has a bias."""
        phi = network.features(params, x, statistics_of)
        has_bias = network.last_linear()[1].bias is not None
        return torch.cat([phi, torch.ones_like(phi[..., :1])], -1) if has_bias else phi

    def _prior(self, network: Network, params: Params) -> tuple[Tensor, Tensor]:
        """The prior mean, (D, outputs), and L, (D, columns), whose rows are zero for weights that tasks share."""
        name, layer = network.last_linear()
        rows = [params[f"{name}weight"].mT]
        if layer.bias is not None:
            rows.append(params[f"{name}bias"][None])
        mean, factor = torch.cat(rows), torch.cat([torch.diag(params[_SCALE].exp()), params[_FACTOR]], -1)
        return mean, torch.nn.functional.pad(factor, (0, 0, len(mean) - len(factor), 0))

    def _noise_variance(self, params: Params) -> Tensor:
        """The variance of the noise of each output, for regression."""
        return torch.exp(2 * params[_NOISE]) + _MIN_NOISE**2

    def _targets(self, network: Network, params: Params, y: Tensor) -> tuple[Tensor, Tensor]:
        """Gaussian targets and noise variances of each output, (rows, outputs)."""
        if not takes_labels(network.loss):
            return y, self._noise_variance(params).expand(y.shape)
        outputs = network.last_linear()[1].out_features
        concentration = params[_NOISE].exp() + (y[:, None] == torch.arange(outputs, device=y.device))
        variance = torch.log1p(1 / concentration)
        return concentration.log() - variance / 2, variance

    def _posterior(
        self, network: Network, params: Params, phi: Tensor, targets: Tensor, noise: Tensor, counted: Tensor
    ) -> Tensor:
        """The posterior mean of the weights, (D, outputs)."""
        mean, factor = self._prior(network, params)
        if len(phi) == 0:
            return mean
        precision = counted / noise.mT.sqrt()
        residuals = (targets - phi @ mean).mT * precision
        return mean + factor @ _shrink((phi @ factor) * precision[..., None], residuals[..., None])[..., 0].mT

    def _negative_evidence(self, network: Network, params: Params, phi: Tensor, y: Tensor, counted: Tensor) -> Tensor:
        (mean, factor), noise, num = self._prior(network, params), self._noise_variance(params), counted.sum()
        precision = counted / noise.sqrt()[:, None]
        whitened, residuals = (phi @ factor) * precision[..., None], (y - phi @ mean).mT * precision
        chol = torch.linalg.cholesky(_plus_identity(whitened @ whitened.mT))
        squares = torch.linalg.solve_triangular(chol, residuals[..., None], upper=False).square().sum((-2, -1))
        log_det = 2 * chol.diagonal(dim1=-2, dim2=-1).log().sum(-1) / num + noise.log()
        if self.dof is None:
            return (squares / num + (log_det + math.log(2 * math.pi))).mean() / 2
        half = torch.as_tensor(self.dof / 2, dtype=y.dtype)
        constant = torch.lgamma(half) - torch.lgamma(half + num / 2) + num / 2 * math.log(math.pi * self.dof)
        tails = (self.dof + num) / 2 * torch.log1p(squares / self.dof)
        return ((tails + constant) / num + log_det / 2).mean()


def _counted(data: Any) -> Tensor:
    """The weight of each datapoint, 0 or 1."""
    return data.weights if isinstance(data, WeightedBatch) else torch.ones(len(data.y), device=data.y.device)


def _shrink(whitened: Tensor, target: Tensor) -> Tensor:
    """Z' (I + Z Z')^-1 R, solved in the smaller dimension of Z, (..., rows, columns)."""
    rows, columns = whitened.shape[-2:]
    if rows <= columns:
        return whitened.mT @ torch.linalg.solve(_plus_identity(whitened @ whitened.mT), target)
    return torch.linalg.solve(_plus_identity(whitened.mT @ whitened), whitened.mT @ target)


def _plus_identity(matrix: Tensor) -> Tensor:
    return matrix + torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


# The adaptations that a file can name
_KINDS: dict[str, type[Adaptation]] = {"BayesianHead": BayesianHead}


def adaptation_to_plain(adaptation: Any) -> Any:
    """An adaptation of the library as plain values for a file; others are returned unchanged."""
    if type(adaptation) not in _KINDS.values():
        return adaptation
    return {"kind": type(adaptation).__name__, **asdict(adaptation)}


def adaptation_from_plain(values: Mapping[str, Any]) -> Adaptation:
    """The inverse of `adaptation_to_plain`."""
    settings = dict(values)
    kind = _KINDS.get(settings.pop("kind", ""))
    if kind is None:
        raise ValueError(f"unknown adaptation {values.get('kind')!r}; there are {', '.join(_KINDS)}")
    return kind(**settings)
