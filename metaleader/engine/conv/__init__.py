"""Meta-gradients of chains: convolutions separated by batch norm and ReLU, followed by any head.

The meta-gradient of a chain needs no automatic differentiation through the convolutions. With flat parameters theta
and the loss L(theta) of one task, an inner step is a forward and a backward pass. The adjoint step

    lambda_s = lambda_{s+1} - H(theta_s) v,    v = D lambda_{s+1},    D the diagonal of step sizes,

is the tangent of these two passes in direction v. It uses the same three products of a convolution: forward, gradient
of the input, gradient of the weight. The intermediate results of an inner step are kept for its adjoint step. The head
begins at the last batch norm and is differentiated by torch: the loss and gradient of one task, and the gradient of an
inner product, batched over tasks with vmap.

Images are stored as (tasks, rows, channels), one row per pixel of each image: channels come last.
"""
