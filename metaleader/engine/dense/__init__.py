"""Multilayer perceptrons on a GPU: the whole meta-gradient of a task in one kernel.

The gradient of a small network is bound by the number of its kernels. Here one kernel takes all inner steps, the query
gradient and all adjoint steps of a task, and a second one averages over tasks. `trace` finds the layers of a network,
`kernel.cu` has the kernels in CUDA C++, `plan` the constants that they are compiled with, and `gradient` launches them.
"""
