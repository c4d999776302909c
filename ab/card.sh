#!/bin/bash
# First call: attention by pairs of blocks that halve latents, against the present form.
export HISPARSE_KERNEL_CACHE=$PWD/ab/cache PYTHONPATH="${PYTHONPATH:-$PWD}"
T0=$(date +%s); at() { echo "== $1 at $(( $(date +%s) - T0 ))s"; }
S=kernels/cuda/src; N=$S:GATHER_FENCE=0; A=ab/abl:ABL
python3 ab/compile.py $S > /tmp/c1 2>&1 & KB=1 python3 ab/compile.py $N > /tmp/c2 2>&1 &
python3 ab/compile.py ab/base > /tmp/c3 2>&1 & HD=128 python3 ab/compile.py $A=1 $A=2 $A=3 > /tmp/c4 2>&1 &
wait; cat /tmp/c1 /tmp/c2 /tmp/c3 /tmp/c4 | cut -c1-200 | head -20; at compiled
timeout 25 python3 ab/bench.py --check $S > /tmp/k1 2>&1 & timeout 25 python3 ab/bench.py --check $N > /tmp/k2 2>&1 & timeout 25 python3 ab/bench.py --check ab/base > /tmp/k3 2>&1 & wait
tail -n 3 /tmp/k1 | cut -c1-1100; tail -n 3 /tmp/k2 | cut -c1-500; tail -n 3 /tmp/k3 | cut -c1-1100; at checked
echo "cells: base, new, new without fences of gatherers"
timeout 28 python3 ab/bench.py --cells f8x128d64,f8x128d16,f8x128d128,f8x64d16,f8x64d64,bfx128d64,f8x128p2048,bfx128p2048,f8x128d77,f8x64d128,bfx128d128,bfx128d16,f8x128d8,f8x128d32,f8x128d108,f8x64d32,f8x64d108,bfx64d64,bfx128p4096,f8x128p4096,f8x64p2048 ab/base $S $N 2>&1 | tail -n 24 | cut -c1-200; at timed
echo "splits 1 2 3 4 5 6 8"
timeout 14 python3 ab/bench.py --noerr --cells f8x128d8,f8x128d16,f8x128d32,f8x128d77,f8x64d16,f8x64d32 $N,SPLITS=1 $N,SPLITS=2 $N,SPLITS=3 $N,SPLITS=4 $N,SPLITS=5 $N,SPLITS=6 $N,SPLITS=8 2>&1 | tail -n 8 | cut -c1-200; at splits
echo "without exchange, gathering, products"
timeout 12 python3 ab/bench.py --noerr --cells f8x128d64,bfx128d64,f8x128p512,bfx128p512 $S $A=1 $A=2 $A=3 2>&1 | tail -n 6 | cut -c1-300; at ablated
timeout 16 ncu --clock-control none -k attend_rows -s 1 -c 1 --section SourceCounters --section WarpStateStats --section MemoryWorkloadAnalysis_Tables --section ComputeWorkloadAnalysis -o /tmp/attn -f python3 ab/one.py $N f8x128d64 > /tmp/n 2>&1 || tail -n 2 /tmp/n | cut -c1-200
timeout 10 python3 ab/prof.py /tmp/attn.ncu-rep f8x128d64 2>&1 | cut -c1-110 | head -32; at profiled
