"""Every kernel in vectorised torch: what runs on the CPU, and what the CUDA kernels are compared with."""
