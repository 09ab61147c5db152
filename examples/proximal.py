"""A proximal meta-leader: updates are pulled to the parameters at the start of the round.

Run it with `python examples/proximal.py`. The anchor is state of the learner, which `state_dict` saves.
"""

import metaleader as ml


class Proximal(ml.FTML):
    """FTML with a penalty of strength / 2 times the squared distance from the anchor."""

    def __init__(self, *args, strength=0.1, **settings):
        super().__init__(*args, **settings)
        self.strength, self.anchor = strength, self.params

    def begin(self, name, classes=None):
        super().begin(name, classes)
        self.anchor = self.params

    def task_gradient(self, params, support, query):
        loss, gradients = super().task_gradient(params, support, query)
        return loss, {n: g + self.strength * (params[n] - self.anchor[n]) for n, g in gradients.items()}

    def state_dict(self, data=True):
        return super().state_dict(data) | {"anchor": self.anchor}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.anchor = dict(state["anchor"])


def make(**settings):
    settings = {"inner_lr": 0.02, "inner_steps": 5, "meta_steps": 2, "tasks_per_step": 5} | settings
    return Proximal(lambda: ml.models.mlp(1, 1), ml.losses.squared_error, **settings)


if __name__ == "__main__":
    for record in ml.play(make(), ml.streams.SinusoidStream(tasks=20, train=20), reveal=20):
        print(f"{record.task}: squared error {record.loss:.3f}")
