"""The paper's theory in code: closed forms (appendix A), Theorem 1, and exact regret (corollary 2)."""

from metaleader.theory.convexity import (
    Constants,
    StepSizeWarning,
    contraction,
    meta_eigenvalues,
    meta_hessian,
    minimise,
    quadratic_constants,
)
from metaleader.theory.logistic import Logistic, logistic, logistic_constants, logistic_loss
from metaleader.theory.online import Simulation, growth, simulate
from metaleader.theory.quadratics import Quadratics, linear_regression, quadratic_loss, quadratics

__all__ = [
    "Constants",
    "Logistic",
    "Quadratics",
    "Simulation",
    "StepSizeWarning",
    "contraction",
    "growth",
    "linear_regression",
    "logistic",
    "logistic_constants",
    "logistic_loss",
    "meta_eigenvalues",
    "meta_hessian",
    "minimise",
    "quadratic_constants",
    "quadratic_loss",
    "quadratics",
    "simulate",
]
