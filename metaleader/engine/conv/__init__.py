"""A network seen as a chain: convolutions with batch norm and ReLU between them, then a head that may be anything.

For such a network the meta-gradient needs no automatic differentiation through the convolutions. With flat parameters
theta and the loss L(theta) of one task, an inner step is a forward and a backward pass, and the adjoint step

    lambda_s = lambda_{s+1} - H(theta_s) v,    v = D lambda_{s+1},    D the diagonal of step sizes,

is the tangent of these two passes in direction v, by the same three products of a convolution (forward, gradient of
its input, gradient of its weight). What the passes of an inner step left behind is kept for it. The head, from the
last batch norm on, is differentiated by torch: one task's loss and gradient, and the gradient of an inner product,
vmapped over tasks.

Images are held as (tasks, rows, channels), a row for each pixel of each image: channels come last.
"""
