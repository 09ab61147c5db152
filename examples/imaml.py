"""iMAML: the implicit gradient of regularised adaptation. Run it with `python examples/imaml.py`."""

import torch

import metaleader as ml


class IMAML(ml.FTML):
    """Adapts with a penalty of strength / 2 times the squared distance; solves (I + H / strength) v = gradient."""

    def __init__(self, *args, strength=2.0, solver_steps=5, **settings):
        super().__init__(*args, **settings)
        self.strength, self.solver_steps = strength, solver_steps

    def task_gradient(self, params, support, query):
        def penalised(adapted, batch):
            distance = sum((adapted[n] - params[n]).square().sum() for n in params)
            return self.loss_fn(adapted, batch) + self.strength / 2 * distance

        adapted = ml.adapt(penalised, params, support, self.inner_lr, self.inner_steps)
        gradient, loss = torch.func.grad_and_value(self.loss_fn)(adapted, query)
        slope = torch.func.vjp(lambda p: torch.func.grad(self.loss_fn)(p, support), adapted)[1]
        flat, named, x = self.layout.flat, self.layout.named, self.layout.flat(gradient)
        residual = direction = -flat(slope(named(x))[0]) / self.strength
        for _ in range(self.solver_steps):  # conjugate gradients
            product = direction + flat(slope(named(direction))[0]) / self.strength
            curvature = (direction * product).sum()  # the solver stops where it is not positive
            size = torch.where(curvature > 1e-12, residual.square().sum() / curvature, 0.0)
            x, before, residual = x + size * direction, residual, residual - size * product
            direction = residual + residual.square().sum() / before.square().sum().clamp(min=1e-20) * direction
        return loss, named(x)


def make(**settings):
    settings = {"inner_lr": 0.02, "inner_steps": 5, "meta_steps": 2, "tasks_per_step": 5} | settings
    return IMAML(lambda: ml.models.mlp(1, 1), ml.losses.squared_error, **settings)


if __name__ == "__main__":
    print([round(r.loss, 3) for r in ml.play(make(), ml.streams.SinusoidStream(tasks=20, train=20), reveal=20)])
