#!/bin/bash
# Second call: final forms. Tests, variants in turn, tables as JSON in $OUT.
export HISPARSE_KERNEL_CACHE=$PWD/ab/cache PYTHONPATH="${PYTHONPATH:-$PWD}"
T0=$(date +%s); late() { [ $(( $(date +%s) - T0 )) -gt $1 ]; }; at() { echo "== $1 at $(( $(date +%s) - T0 ))s"; }
S=kernels/cuda/src; E=ab/e24; F=ab/e32; M=ab/main
mkdir -p /tmp/t1 /tmp/t2
python3 ab/compile.py $S > /tmp/c1 2>&1 & KB=1 python3 ab/compile.py $E $M > /tmp/c2 2>&1 & KB=2 python3 ab/compile.py $E $F > /tmp/c3 2>&1 & KB=2 python3 ab/compile.py $M > /tmp/c4 2>&1 &
KB=1 python3 ab/compile.py $F > /tmp/c5 2>&1 & python3 ab/dindex.py compile 0 1 > /tmp/c6 2>&1 & wait
cat /tmp/c? | grep -v " 0 [0-9.]*s$" | cut -c1-160 | head -12; at compiled
P="timeout 28 python3 -m pytest -q -p no:cacheprovider --no-header"
TMPDIR=/tmp/t1 $P tests/gpu/test_attention.py -k "bfloat16 and (512 or ignores) or maxima" > /tmp/p1 2>&1 &
TMPDIR=/tmp/t2 $P tests/gpu/test_index_topk.py > /tmp/p2 2>&1 &
timeout 15 python3 ab/attn.py --check $S 2>&1 | tail -n 1 | cut -c1-700
timeout 15 python3 ab/dindex.py check 2>&1 | tail -n 3 | cut -c1-300
ok() { timeout 10 python3 ab/attn.py --check $1 > /tmp/k 2>&1; tail -n 1 /tmp/k | cut -c1-150; grep -q "cases .* bad: \[\]" /tmp/k; }
V="$M $S"; ok $E && V="$V $E"; ok $F && V="$V $F"; wait
tail -n 4 /tmp/p1 | cut -c1-300; tail -n 4 /tmp/p2 | cut -c1-300; at tested
echo "attention: main, final, plain stores with 24 bits, with 32"
echo "$V"
timeout 13 python3 ab/attn.py --cells f8x128d64,f8x128d128,f8x128d77,f8x128d8,f8x128p2048,f8x128p4096 $V 2>&1 | tail -n 6 | cut -c1-200
timeout 12 python3 ab/attn.py --cells bfx128d64,bfx128d128,bfx128d77,bfx128p4096 $V 2>&1 | tail -n 4 | cut -c1-200
timeout 12 python3 ab/attn.py --cells bfx64d128,bfx64p2048,bfx64d64,f8x64d64,f8x64d128,f8x64p2048 $V 2>&1 | tail -n 6 | cut -c1-200; at timed
LEFT=12 timeout 17 python3 ab/dindex.py times 2>&1 | tail -n 11 | cut -c1-260; at timed
late 100 || timeout 26 python3 -m benchmarks.attention --out $OUT/attention-H200.json --budget-seconds 20 2>&1 | cut -c1-90 | tail -n 20; at recorded
late 112 || timeout 16 python3 -m benchmarks.index_topk --kind fp8 --out $OUT/index_topk-H200.json --budget-seconds 10 2>&1 | cut -c1-90 | tail -n 13; at recorded
rm -f $OUT/*.svg
