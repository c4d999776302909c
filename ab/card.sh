#!/bin/bash
# Second call: attention with scores ahead, pairs that go from result to result, prompts' lists; their costs; profiles.
export HISPARSE_KERNEL_CACHE=/tmp/kc PYTHONPATH="${PYTHONPATH:-$PWD}" PYTHONUNBUFFERED=1
cp -r ab/cache /tmp/kc 2>/dev/null; mkdir -p /tmp/kc
T0=$(date +%s); at() { echo "== $1 at $(( $(date +%s) - T0 ))s"; }; late() { [ $(( $(date +%s) - T0 )) -gt $1 ]; }
S=kernels/cuda/src
HD=128 KB=1 timeout 70 python3 ab/compile.py ab/t11 ab/t9 ab/t6 > /tmp/u0 2>&1 & HD=128 KB=2 timeout 70 python3 ab/compile.py ab/t11 ab/t6 ab/t5 > /tmp/u1 2>&1 &
HD=128 timeout 70 python3 ab/compile.py ab/t12 > /tmp/u2 2>&1 & HD=128 KB=1 timeout 70 python3 ab/compile.py ab/t10 > /tmp/u3 2>&1 & HD=64 timeout 70 python3 ab/compile.py ab/t11 > /tmp/u6 2>&1 &
timeout 70 python3 ab/pindex.py compile ab/p1 ab/p2 > /tmp/u4 2>&1 & timeout 70 python3 ab/pindex.py compile ab/p2:SCORED=20 ab/p2:LIST_READS=4 > /tmp/u5 2>&1 & wait
cat /tmp/u? | grep -v " 0 [0-9.]*s$" | cut -c1-110 | head -14; at compiled
for v in t6 t11 t12; do HD=128 timeout 20 python3 ab/attn.py --check ab/$v > /tmp/k_$v 2>&1; tail -n 1 /tmp/k_$v | cut -c1-420; done; at checked
C=d64,d128,d16,d77,p2048,p4096
echo "bf16: main t5 t6 t11 t12"; timeout 28 python3 ab/attn.py --cells bfx128${C//,/,bfx128} $S ab/t5 ab/t6 ab/t11 ab/t12 2>&1 | tail -n 6 | cut -c1-180; at timed
echo "fp8: main t6 t9 t10 t11 t12"; timeout 30 python3 ab/attn.py --cells f8x128${C//,/,f8x128} $S ab/t6 ab/t9 ab/t10 ab/t11 ab/t12 2>&1 | tail -n 6 | cut -c1-200; at timed
timeout 45 python3 ab/pindex.py run $S ab/p1 ab/p2 ab/p2:SCORED=20 ab/p2:LIST_READS=4 2>&1 | tail -n 10 | cut -c1-170; at prompts
A=ab/t11:SPLITS=; L=""; for t in 128 64; do for n in 1 2 3 4; do L="$L $A$n,TOGETHER=$t"; done; done
C=d8,d16,d24,d32,d40,d48,d64,d77; echo "splits 1 to 4 by 128 heads a pair, 1 to 4 by 64"
timeout 16 python3 ab/attn.py --noerr --cells f8x128${C//,/,f8x128} $L 2>&1 | tail -n 8 | cut -c1-100
timeout 16 python3 ab/attn.py --noerr --cells bfx128${C//,/,bfx128} $L 2>&1 | tail -n 8 | cut -c1-100; at splits
N="timeout 18 ncu --clock-control none --section SpeedOfLight --section SourceCounters --section WarpStateStats --section LaunchStats --section Occupancy --section ComputeWorkloadAnalysis --section MemoryWorkloadAnalysis"
prof() { late 250 && return; $N -k $2 -s $3 -c 1 -o /tmp/p_$1 -f python3 "${@:4}" > /tmp/n 2>&1 || tail -n 2 /tmp/n | cut -c1-200; timeout 8 python3 ab/prof.py /tmp/p_$1.ncu-rep $1 $TOP > /tmp/q 2>&1; head -n 1 /tmp/q | cut -c1-640; tail -n +3 /tmp/q | cut -c1-85; }
TOP=16 prof f8p512 attend_rows 1 ab/one.py ab/t11 f8x128p512
TOP=14 prof bfp512 attend_rows 1 ab/one.py ab/t11 bfx128p512
TOP=14 prof p8k prompt_index 1 ab/cell.py prompt 8192 4096; at profiled
