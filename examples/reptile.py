"""Online Reptile: the parameters move towards those after adaptation. Run it with `python examples/reptile.py`."""

import metaleader as ml


class Reptile(ml.FTML):
    """The gradient is the difference between the parameters before and after adaptation."""

    def task_gradient(self, params, support, query):
        adapted = ml.adapt(self.loss_fn, params, support, self.inner_lr, self.inner_steps)
        return self.loss_fn(adapted, query), {name: params[name] - adapted[name] for name in params}


def make(**settings):
    settings = {"inner_lr": 0.02, "inner_steps": 5, "meta_steps": 2, "tasks_per_step": 5} | settings
    return Reptile(lambda: ml.models.mlp(1, 1), ml.losses.squared_error, **settings)


if __name__ == "__main__":
    for record in ml.play(make(), ml.streams.SinusoidStream(tasks=20, train=20), reveal=20):
        print(f"{record.task}: squared error {record.loss:.3f}")
