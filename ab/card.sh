#!/bin/bash
# First call: the decode index (second round), attention with 16 bits of a score, four or eight gathering warps, cuts.
export HISPARSE_KERNEL_CACHE=$PWD/ab/cache PYTHONPATH="${PYTHONPATH:-$PWD}"
T0=$(date +%s); late() { [ $(( $(date +%s) - T0 )) -gt $1 ]; }; at() { echo "== $1 at $(( $(date +%s) - T0 ))s"; }
S=kernels/cuda/src; B=ab/base; G=$S:GATHER_WARPS=4
for i in 0 1 2; do timeout 25 python3 ab/dindex.py compile $i 3 > /tmp/dc$i 2>&1 & done
python3 ab/compile.py $S $S:BITS=24 > /tmp/c1 2>&1 & KB=2 python3 ab/compile.py $G $G,WIDE=0 $G,BITS=24 $B > /tmp/c2 2>&1 & KB=1,2 HD=64 python3 ab/compile.py $S:LOCAL=0 > /tmp/c3 2>&1 & wait
head -c 200 /tmp/dc0; cat /tmp/c1 /tmp/c2 /tmp/c3 | grep -v " 0 0\.\|None" | cut -c1-160 | head -12; at compiled
timeout 12 python3 ab/attn.py --check $S 2>&1 | tail -n 1 | cut -c1-700; KINDS=bfloat16 timeout 8 python3 ab/attn.py --check $G 2>&1 | tail -n 1 | cut -c1-500; at checked
echo "attention: now (24 bits), 16 bits"
timeout 12 python3 ab/attn.py --cells f8x128d64,f8x128d128,f8x128d16,f8x128d77,f8x128d32,f8x128d108,f8x128d8,f8x128p2048,f8x128p4096 $S:BITS=24 $S 2>&1 | tail -n 9 | cut -c1-200; at timed
echo "now, 16 bits, four gathering warps with 24, with 16, with 16 and 128 columns"
timeout 13 python3 ab/attn.py --cells bfx128d64,bfx128d128,bfx128p4096,bfx128d16,bfx128d32,bfx128d108 $S:BITS=24 $S $G,BITS=24 $G $G,WIDE=0 2>&1 | tail -n 6 | cut -c1-200; at timed
echo "the form before, now, 16 bits, 16 bits with parts by the cluster, four gathering warps"
timeout 14 python3 ab/attn.py --cells bfx64d128,bfx64p2048,bfx64d64,bfx64d16,bfx64d32,bfx64d108 $B $S:BITS=24 $S $S:LOCAL=0 $G 2>&1 | tail -n 6 | cut -c1-200
echo "now, 16 bits, 16 bits with parts by the cluster"
timeout 12 python3 ab/attn.py --cells f8x64d64,f8x64d128,f8x64p2048,f8x64d16,f8x64d32,f8x64d108 $S:BITS=24 $S $S:LOCAL=0 2>&1 | tail -n 6 | cut -c1-200; at timed
timeout 15 python3 ab/dindex.py check 2>&1 | tail -n 8 | cut -c1-300; at checked
LEFT=14 timeout 18 python3 ab/dindex.py times 2>&1 | tail -n 14 | cut -c1-300; at timed
A=$S:SPLITS=; echo "splits 1 to 4 by 128 heads a pair, 1 to 4 by 64"
C=d8,d16,d24,d32,d40,d48,d64,d77; L=""; for t in 128 64; do for n in 1 2 3 4; do L="$L $A$n,TOGETHER=$t"; done; done
timeout 16 python3 ab/attn.py --noerr --cells f8x128${C//,/,f8x128} $L 2>&1 | tail -n 8 | cut -c1-120; at splits
late 112 || timeout 12 python3 ab/attn.py --noerr --cells bfx128d16,bfx128d32,bfx128d48,bfx128d64 $L 2>&1 | tail -n 8 | cut -c1-120
late 118 || timeout 8 python3 ab/attn.py --noerr --cells f8x64d16,f8x64d32,f8x64d48,f8x64d77 ${A}{1,2,3,4},TOGETHER=64 2>&1 | tail -n 8 | cut -c1-120; at splits
late 124 || timeout 10 python3 ab/dindex.py probe 2>&1 | tail -n 14 | cut -c1-300; at probed
late 122 && exit; timeout 14 ncu --clock-control none -k attend_rows -s 1 -c 1 --section SpeedOfLight --section SourceCounters --section WarpStateStats -o /tmp/attn -f python3 ab/one.py $S f8x128p512 > /tmp/n 2>&1 || tail -n 2 /tmp/n | cut -c1-200
timeout 8 python3 ab/prof.py /tmp/attn.ncu-rep f8x128p512 2>&1 | cut -c1-100 | head -22; at profiled
