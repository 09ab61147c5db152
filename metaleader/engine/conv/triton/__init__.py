"""The four passes through a chain's convolutions as Triton kernels, one for each layer and product.

A convolution's kernel reads the output y of the layer before, applies batch norm and ReLU as it goes, and leaves its
own output with the sums that the next batch norm needs, so no tensor is written but y. The backward kernels do the
same with the gradient `above` at ReLU's input, from which the slope at the layer's output follows by batch norm's
formula. With TANGENT a kernel computes the tangent of what it computes without.

Sums over rows are taken block by block; the last block of a task to finish adds the blocks up, always in the same
order, so results are the same from run to run. Products are float32 by three TF32 products each (an error of 1e-7),
or by one where torch is allowed TF32.
"""

from metaleader.engine.conv.triton.launch import TritonPasses

__all__ = ["TritonPasses"]
