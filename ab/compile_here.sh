export HISPARSE_KERNEL_CACHE=$PWD/ab/cache PYTHONPATH=$PWD
.venv/bin/python ab/compile.py kernels/cuda/src > /tmp/attn_c1.txt 2>&1 &
(KB=1 .venv/bin/python ab/compile.py kernels/cuda/src:GATHER_FENCE=0; HD=128 KB=1 .venv/bin/python ab/compile.py ab/abl:ABL=1 ab/abl:ABL=2)  > /tmp/attn_c2.txt 2>&1 &
wait
