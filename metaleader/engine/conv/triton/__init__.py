"""The four passes through a chain's convolutions as Triton kernels, one launch per layer and product.

The kernel of a convolution reads the output y of the previous layer and applies batch norm and ReLU on the fly. It
writes its output and the sums that the next batch norm needs, so y is the only large tensor written. The backward
kernels do the same with the gradient `above` at the input of ReLU; the formula of batch norm gives the slope at the
layer's output from it. With TANGENT a kernel computes the tangent of its result.

Sums over rows are computed per block. The last block of a task to finish adds the sums of all blocks in a fixed order,
so results are identical from run to run. A float32 product is computed by three TF32 products, with an error of 1e-7,
or by one if torch is allowed to use TF32.
"""

from metaleader.engine.conv.triton.launch import TritonPasses

__all__ = ["TritonPasses"]
