"""Every kernel for NVIDIA GPUs of compute capability 8.0 and up, behind the contracts of kernels/*.py.

`launch.prepare` compiles and loads what a state needs, at worker start. Attention, encoding and draws are written in
Triton, all or in part, and compile in a first run. No launcher waits for the device. CUDA sources lie in src/.
"""
