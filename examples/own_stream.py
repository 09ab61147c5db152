"""Your own stream: one small regression problem per sensor of a plant; later sensors need fewer readings.

Run it with `python examples/own_stream.py`.
"""

import numpy as np

import metaleader as ml


def readings(sensor: int, num: int = 40) -> dict[str, np.ndarray]:
    """Return the voltages of a sensor at random angles; each sensor has a random gain. Replace this with your data."""
    draw = np.random.default_rng(sensor)
    angle = draw.uniform(-1.0, 1.0, (num, 1))
    voltage = draw.uniform(-2.0, 2.0) * np.cos(3.0 * angle) + draw.normal(0.0, 0.02, (num, 1))
    return {"x": angle.astype(np.float32), "y": voltage.astype(np.float32)}


def main(sensors: int = 20) -> list[float]:
    """Play the stream, and return the error for each sensor after its first ten readings."""
    stream = ml.streams.ArrayStream({f"sensor {i}": readings(i) for i in range(sensors)}, held_out=0.5)
    settings = {"inner_lr": 0.1, "inner_steps": 3, "meta_lr": 1e-2, "meta_steps": 5, "support": 5, "query": 5}
    learner = ml.FTML(lambda: ml.models.mlp(1, 1), ml.losses.squared_error, **settings)
    errors = []
    for record in ml.play(learner, stream, reveal=10):
        if record.datapoints == 10:
            errors.append(record.loss)
            print(f"{record.task:>9}: squared error {record.loss:.4f} after 10 readings")
    return errors


if __name__ == "__main__":
    main()
