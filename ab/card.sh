#!/bin/bash
# Third call: eight gathering warps (S), four (T), the form before (B); pairs of 64 heads for 128 (H).
export HISPARSE_KERNEL_CACHE=$PWD/ab/cache PYTHONPATH="${PYTHONPATH:-$PWD}"
T0=$(date +%s); at() { echo "== $1 at $(( $(date +%s) - T0 ))s"; }
S=ab/s; T=ab/t; B=ab/base; H=$S:TOGETHER=64; W=$S:NARROW=1
python3 ab/compile.py $S > /tmp/c1 2>&1 & python3 ab/compile.py $T > /tmp/c2 2>&1 & KB=1 python3 ab/compile.py $W > /tmp/c4 2>&1 &
python3 ab/compile.py $B > /tmp/c3 2>&1 & wait; cat /tmp/c1 /tmp/c2 /tmp/c3 /tmp/c4 | cut -c1-200 | head -20; at compiled
timeout 16 python3 ab/bench.py --check $S 2>&1 | tail -n 2 | cut -c1-500; at checked
echo "cells: B S T W(fp8: 24 bits) H"
timeout 16 python3 ab/bench.py --cells f8x128d64,f8x128d16,f8x128d128,f8x128d77,f8x128d32,f8x128d108,f8x128d8,f8x128p2048 $B $S $T $W $H 2>&1 | tail -n 9 | cut -c1-200; at timed
timeout 12 python3 ab/bench.py --cells bfx128d64,bfx128d16,bfx128d32,bfx128d128,bfx128p4096,f8x128p4096 $B $S $T $H 2>&1 | tail -n 7 | cut -c1-200; at timed
timeout 14 python3 ab/bench.py --cells f8x64d64,f8x64d16,f8x64d128,f8x64d108,f8x64d32,f8x64d77,bfx64d64,bfx64d128,f8x64p2048,bfx64p2048 $B $S $T $W 2>&1 | tail -n 11 | cut -c1-200; at timed
echo "splits 1 2 3 4 of S"
timeout 8 python3 ab/bench.py --noerr --cells f8x128d8,f8x128d32,f8x128d77,f8x64d32,f8x64d77,bfx128d32 $S:SPLITS=1,TOGETHER=128 $S:SPLITS=2,TOGETHER=128 $S:SPLITS=3,TOGETHER=128 $S:SPLITS=4,TOGETHER=128 $S:SPLITS=1,TOGETHER=64 $S:SPLITS=2,TOGETHER=64 2>&1 | tail -n 7 | cut -c1-200; at splits
timeout 24 compute-sanitizer --tool memcheck python3 -c "import tests.gpu.memcheck_attention as m; m.attention(); print('done')" > /tmp/m 2>&1; grep -v "^=========  *Host Frame" /tmp/m | head -n 14 | cut -c1-160; tail -n 1 /tmp/m; at memcheck
