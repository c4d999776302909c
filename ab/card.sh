#!/bin/bash
# Second call: a pair goes from result to result (S) or not (P), 24 bits of a score or 32 (W), against the form before.
export HISPARSE_KERNEL_CACHE=$PWD/ab/cache PYTHONPATH="${PYTHONPATH:-$PWD}"
T0=$(date +%s); at() { echo "== $1 at $(( $(date +%s) - T0 ))s"; }
S=kernels/cuda/src; W=$S:NARROW=0; P=ab/plain; B=ab/base
python3 ab/compile.py $S > /tmp/c1 2>&1 & python3 ab/compile.py $P > /tmp/c2 2>&1 & HD=128 python3 ab/compile.py $W > /tmp/c4 2>&1 &
python3 ab/compile.py $B > /tmp/c3 2>&1 & wait; cat /tmp/c1 /tmp/c2 /tmp/c3 /tmp/c4 | cut -c1-200 | head -20; at compiled
timeout 22 python3 ab/bench.py --check $S > /tmp/k1 2>&1 & timeout 22 python3 ab/bench.py --check $P > /tmp/k2 2>&1 & timeout 22 python3 ab/bench.py --check $B > /tmp/k3 2>&1 & wait
tail -n 4 /tmp/k1 | cut -c1-1000; tail -n 2 /tmp/k2 | cut -c1-300; tail -n 2 /tmp/k3 | cut -c1-1000; at checked
echo "cells: base, persistent, plain, persistent with 32 bits"
timeout 28 python3 ab/bench.py --cells f8x128d64,f8x128d16,f8x128d128,bfx128d64,bfx128d128,f8x128d77,f8x128d32,f8x128d8,f8x128d108,bfx128d16,bfx128d32,bfx128p2048,f8x128p2048,bfx128p4096,f8x128p4096 $B $S $P $W 2>&1 | tail -n 18 | cut -c1-200; at timed
timeout 14 python3 ab/bench.py --cells f8x64d16,f8x64d64,f8x64d108,f8x64d128,f8x64d32,f8x64d8,bfx64d64,bfx64d16,f8x64p2048,bfx64p2048 $B $S $P 2>&1 | tail -n 12 | cut -c1-200; at timed
echo "splits 1 2 3 4 of S"
timeout 10 python3 ab/bench.py --noerr --cells f8x128d8,f8x128d32,f8x128d40,f8x128d77,f8x64d32,f8x64d77,bfx128d32 $S:SPLITS=1 $S:SPLITS=2 $S:SPLITS=3 $S:SPLITS=4 2>&1 | tail -n 8 | cut -c1-200; at splits
timeout 14 ncu --clock-control none -k attend_rows -s 1 -c 1 --section SourceCounters --section WarpStateStats -o /tmp/attn -f python3 ab/one.py $S f8x128d64 > /tmp/n 2>&1 || tail -n 2 /tmp/n | cut -c1-200
timeout 8 python3 ab/prof.py /tmp/attn.ncu-rep f8x128d64 2>&1 | cut -c1-100 | head -26; at profiled
timeout 24 compute-sanitizer --tool memcheck python3 -c "import tests.gpu.memcheck_attention as m; m.attention(); print('done')" 2>&1 | tail -n 3 | cut -c1-200; at memcheck
