"""Figures of the theory: regret against T, joint and MAML minimisers, and the limit of convexity.

The colours are the colour-blind safe palette of Okabe and Ito. Line styles distinguish the curves in grey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from metaleader.system.files import write_drawn
from metaleader.theory.convexity import Constants, quadratic_constants
from metaleader.theory.online import FTL, FTL_ADAPTED, FTML, STREAMING, Simulation, doublings
from metaleader.theory.quadratics import Quadratics, quadratics

_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#666666"
_STYLES: dict[str, tuple[str, Literal["-", "--", "-.", ":"]]] = {
    FTML: (_BLUE, "-"),
    STREAMING: (_ORANGE, "--"),
    FTL_ADAPTED: (_GREEN, "-."),
    FTL: (_RED, ":"),
}
_MARKS = ("o", "s", "^", "D", "v", "P")


def save(figure: Figure, out: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG files, which are reproducible byte for byte."""
    paths = [out / f"{name}.png", out / f"{name}.svg"]
    write_drawn(paths[0], lambda file: figure.savefig(file, format="png", dpi=110))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        write_drawn(paths[1], lambda file: figure.savefig(file, format="svg", metadata={"Date": None}))
    return paths


def regret_figure(simulations: Mapping[str, Simulation]) -> Figure:
    """Plot regret and its bounds against T for every family, and R(2T) - R(T) in a separate panel."""
    rows = -(-(len(simulations) + 1) // 3)
    figure = Figure(figsize=(10.5, 0.9 + 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False).flatten()
    highest = 2 * max(float(simulation.bound[-1]) for simulation in simulations.values())
    for ax, (family, simulation) in zip(axes, simulations.items(), strict=False):
        # 200 points, evenly spaced on the logarithmic axis.
        shown = np.unique(np.geomspace(1, len(simulation.rounds), 200).round().astype(int)) - 1
        rounds = simulation.rounds[shown].numpy()
        for name, (colour, style) in _STYLES.items():
            regret = simulation.regret[name][:, shown]
            ax.plot(rounds, regret.mean(0), color=colour, linestyle=style, linewidth=2 if name == FTML else 1.5)
            ax.fill_between(rounds, regret.amin(0), regret.amax(0), color=colour, alpha=0.15, linewidth=0)
        ax.plot(rounds, simulation.gradient_bound[:, shown].mean(0), color=_GREY, linewidth=1)
        ax.plot(rounds, simulation.bound[shown], color=_GREY, linestyle=(0, (6, 2)), linewidth=1)
        ax.set(title=family, xscale="log", yscale="log", xlabel="T", xlim=(1, rounds[-1]))
        ax.set_ylim(0.3, highest)
        _style(ax)
    _doubling_panel(axes[len(simulations)], simulations)
    for ax in axes[len(simulations) + 1 :]:
        ax.set_axis_off()
    for row in range(rows):
        axes[3 * row].set_ylabel("regret R(T)")
    handles = [
        Line2D([], [], color=colour, linestyle=style, linewidth=2, label=name)
        for name, (colour, style) in _STYLES.items()
    ]
    handles.append(Line2D([], [], color=_GREY, linewidth=1, label="gradient bound of FTML"))
    handles.append(
        Line2D([], [], color=_GREY, linestyle=(0, (6, 2)), linewidth=1, label="corollary 2: 32 G²/µ (1 + log T)")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8.5)
    return figure


def minimiser_figure() -> Figure:
    """Plot three tasks in the plane, with the initialisations of joint training and MAML and their adapted points."""
    tasks, alpha = illustration()
    joint, maml = tasks.mean().minimiser(), tasks.adapted(alpha).mean().minimiser()
    figure = Figure(figsize=(6.4, 6.6), layout="constrained")
    ax = figure.subplots()
    grid = torch.stack(
        torch.meshgrid(
            torch.linspace(-2.5, 3.0, 300, dtype=torch.float64),
            torch.linspace(-2.5, 2.5, 300, dtype=torch.float64),
            indexing="xy",
        ),
        dim=-1,
    )
    centres = tasks.minimiser()
    for i, (colour, label) in enumerate(zip((_GREEN, _ORANGE, _PURPLE), "ABC", strict=True)):
        task = Quadratics(*(values[i] for values in tasks))
        ax.contour(grid[..., 0], grid[..., 1], task.value(grid), levels=[0.1, 0.35], colors=colour, linewidths=1)
        ax.plot(*centres[i], marker="x", color=colour, markersize=8, markeredgewidth=2)
        ax.annotate(
            f"task {label}",
            tuple(centres[i].tolist()),
            xytext=(0, 7),
            textcoords="offset points",
            color=colour,
            ha="center",
        )
    after = tasks.adapted(alpha).mean()
    for w, colour, mark, name in ((joint, _RED, "s", "joint training"), (maml, _BLUE, "*", "MAML")):
        adapted = w - alpha * tasks.gradient(w)
        for point in adapted:
            ends = tuple(point.tolist()), tuple(w.tolist())
            ax.annotate("", *ends, arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.3})
        ax.scatter(adapted[:, 0], adapted[:, 1], s=16, color=colour, zorder=3)
        label = f"{name}: mean loss {float(tasks.mean().value(w)):.3f}, after one step {float(after.value(w)):.3f}"
        size = 190 if mark == "*" else 70
        ax.scatter(*w, marker=mark, s=size, color=colour, edgecolor="black", linewidth=0.7, zorder=4, label=label)
    ax.set(xlabel="w₁", ylabel="w₂", aspect="equal", title="Initialisations and their adapted points (dots)")
    figure.legend(loc="outside lower center", fontsize=9, frameon=False)
    return figure


def convexity_figure(
    multiples: Sequence[float], eigenvalues: Sequence[tuple[float, float]], constants: Constants
) -> Figure:
    """Plot extreme eigenvalues of the logistic meta-Hessian over W, and Theorem 1's range, against the step size."""
    least, most = np.asarray(eigenvalues).T
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    ax = figure.subplots()
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=0.1, linscale=1)
    ax.fill_between(
        [multiples[0], 1], constants.meta_mu, constants.meta_beta, color=_GREY, alpha=0.2, linewidth=0,
        label="promised: µ/8 to 9β/8",
    )  # fmt: skip
    ax.plot(multiples, most, color=_ORANGE, linestyle="--", marker="s", markersize=3.5, label="largest eigenvalue")
    ax.plot(multiples, least, color=_BLUE, marker="o", markersize=3.5, label="smallest eigenvalue")
    ax.axhline(0, color="black", linewidth=0.8)
    ax.axvline(1, color=_GREY, linewidth=1, linestyle=":")
    nonconvex = [multiple for multiple, value in zip(multiples, least, strict=True) if value < 0]
    if nonconvex:
        ax.axvline(nonconvex[0], color=_RED, linewidth=1, linestyle=":")
        ax.annotate(
            f"not convex from {nonconvex[0]:.0f} times\nthe bound on", (nonconvex[0], -1), xytext=(-8, 0), color=_RED,
            textcoords="offset points", ha="right", va="center", fontsize=9,
        )  # fmt: skip
    ax.set(
        xlabel="α / min(1/(2β), µ/(8ρG))",
        ylabel="eigenvalues of the meta-Hessian over W",
        title="Logistic regression: where convexity ends",
        xlim=(multiples[0], multiples[-1]),
        yticks=[-10, -1, -0.1, 0, 0.1, 1, 10],
        yticklabels=["−10", "−1", "−0.1", "0", "0.1", "1", "10"],
    )
    ax.legend(loc="upper left", fontsize=9)
    _style(ax)
    return figure


def illustration() -> tuple[Quadratics, float]:
    """Return three tasks in the plane, one steep and two flat, and Theorem 1's step size for them."""
    A = torch.tensor([[[2.0, 0.3], [0.3, 1.4]], [[0.9, -0.2], [-0.2, 0.6]], [[0.5, 0.1], [0.1, 0.8]]]).double()
    centres = torch.tensor([[-1.6, -0.4], [1.9, 1.3], [1.5, -1.5]], dtype=torch.float64)
    b = -(A @ centres[..., None])[..., 0]
    tasks = quadratics(A, b, -(centres * b).sum(-1) / 2)
    return tasks, quadratic_constants(tasks, radius=3.0).alpha


def _doubling_panel(ax: Axes, simulations: Mapping[str, Simulation]) -> None:
    def line(regret: Tensor, label: str, colour: str, style: str, mark: str) -> None:
        starts, differences = doublings(regret)
        ax.plot(starts, differences, color=colour, linestyle=style, marker=mark, markersize=4, label=label)

    for (family, simulation), mark in zip(simulations.items(), _MARKS, strict=False):
        line(simulation.regret[FTML], f"FTML, {family}", _BLUE, "-", mark)
    if "correlated" in simulations:
        line(simulations["correlated"].regret[FTL_ADAPTED], "FTL + adaptation,\ncorrelated", _GREEN, "-.", "X")
    starts, _ = doublings(next(iter(simulations.values())).regret[FTML])
    ax.set(title="R(2T) − R(T)", xscale="log", yscale="log", xlabel="T", xticks=starts, xticklabels=starts)
    ax.minorticks_off()
    low, high = ax.get_ylim()
    ax.set_ylim(low / 1.5, high * 20)
    ax.legend(fontsize=7.5, loc="upper left", ncols=2, frameon=False, handlelength=1.6, columnspacing=1)
    _style(ax)


def _style(ax: Axes) -> None:
    ax.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
