#!/bin/bash
# First call: tables alone on the card, profiles of cells that miss, then tests of main's forms in parallel.
export HISPARSE_KERNEL_CACHE=/tmp/kc PYTHONPATH="${PYTHONPATH:-$PWD}" PYTHONUNBUFFERED=1
cp -r ab/cache /tmp/kc 2>/dev/null; mkdir -p /tmp/kc
T0=$(date +%s); at() { echo "== $1 at $(( $(date +%s) - T0 ))s"; }; left() { echo $(( 475 - $(date +%s) + T0 )); }
S=kernels/cuda/src
for i in 0 1; do timeout 60 python3 ab/units.py $i 2 > /tmp/u$i 2>&1 & done
KB=1 timeout 60 python3 ab/compile.py ab/t6 > /tmp/u2 2>&1 & KB=2 timeout 60 python3 ab/compile.py ab/t6 > /tmp/u3 2>&1 &
HD=128 timeout 60 python3 ab/compile.py ab/t5 > /tmp/u4 2>&1 & wait; cat /tmp/u? | grep -v " 0\.[0-9]*s$" | cut -c1-110 | head -9; at compiled
timeout 20 python3 -m benchmarks.index_topk --kind fp8 --out $OUT/index_topk-H200.json --budget-seconds 12 2>&1 | cut -c1-100 | tail -n 13; at index
timeout 30 python3 -m benchmarks.attention --out $OUT/attention-H200.json --budget-seconds 22 2>&1 | cut -c1-76 | tail -n 20; at attention
timeout 25 python3 -m benchmarks.prompt_index --out $OUT/prompt.json 2>&1 | sed 's/"//g;s/context/c/;s/tokens/t/' | cut -c1-120 | tail -n 11; at prompts
rm -f $OUT/*.svg
HD=128 timeout 16 python3 ab/attn.py --check ab/t6 2>&1 | tail -n 1 | cut -c1-300
echo "attention: now, a product of scores ahead by t5, t6"
timeout 16 python3 ab/attn.py --cells bfx128d64,bfx128d128,bfx128d16,bfx128p2048,bfx128p4096 $S ab/t5 ab/t6 2>&1 | tail -n 5 | cut -c1-120
timeout 14 python3 ab/attn.py --cells f8x128d64,f8x128d128,f8x128d16,f8x128p2048,f8x128p4096 $S ab/t5 ab/t6 2>&1 | tail -n 5 | cut -c1-120; at variants
N="timeout 16 ncu --clock-control none --section SpeedOfLight --section SourceCounters --section WarpStateStats --section LaunchStats --section Occupancy"
prof() { $N -k $2 -s $3 -c 1 -o /tmp/p_$1 -f python3 "${@:4}" > /tmp/n 2>&1 || tail -n 2 /tmp/n | cut -c1-200; timeout 8 python3 ab/prof.py /tmp/p_$1.ncu-rep $1 $TOP 2>&1 | cut -c1-${W:-100}; }
W=95
TOP=20 prof f8d64 attend_rows 1 ab/one.py kernels/cuda/src f8x128d64
TOP=14 prof bfd64 attend_rows 1 ab/one.py kernels/cuda/src bfx128d64
TOP=14 prof t6f8d64 attend_rows 1 ab/one.py ab/t6 f8x128d64
TOP=14 prof p8k prompt_index 1 ab/cell.py prompt 8192 4096
TOP=8 prof score8k index_scores 2 ab/cell.py index 8192 1
TOP=8 prof select8k index_select 2 ab/cell.py index 8192 1; at profiled
for t in worker runner fences prefix prompt_index index_topk memory attention; do
    mkdir -p /tmp/t_$t; (s=$(date +%s); TMPDIR=/tmp/t_$t timeout $(left) python3 -m pytest -q -p no:cacheprovider --no-header -n0 tests/gpu/test_$t.py > /tmp/o_$t 2>&1; echo "rc $? $(( $(date +%s) - s ))s" >> /tmp/o_$t) &
done; wait
for t in attention index_topk fences memory prompt_index prefix runner worker; do
    echo "$t: $(grep -E 'passed|failed|error' /tmp/o_$t | tail -n 1 | cut -c1-120) $(tail -n 1 /tmp/o_$t)"; grep -E "^(FAILED|ERROR)" /tmp/o_$t | cut -c1-230 | head -5
    grep -q "^rc 0" /tmp/o_$t || { grep -E "^E  " /tmp/o_$t | cut -c1-200 | head -4; grep -q "passed\|failed" /tmp/o_$t || tail -n 3 /tmp/o_$t | cut -c1-160; }
done; at tested
