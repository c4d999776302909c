#!/bin/bash
# usage: ab/cpu.sh SECONDS CORES (such as 8-15) [FIRST_SEED]: seeds of the simulated cluster, whose groups split passes, then mutants of fences.
cd "$(dirname "$0")/.."
seconds=$1 cores=$2 first=${3:-620000} out=/tmp/all-sim; rm -rf $out; mkdir -p $out
export OMP_NUM_THREADS=1
ends=$((SECONDS + seconds - 6)); number=0
for core in $(python3 -c "
import sys
for part in sys.argv[1].split(','):
    a, _, b = part.partition('-'); print(*range(int(a), int(b or a) + 1))" "$cores"); do
  (at=$((first + 10000 * number)); while [ $((ends - SECONDS)) -gt 3 ]; do
     timeout -s KILL $((ends - SECONDS)) taskset -c $core nice -n 5 ${PYTHON:-python3} -m tests.sim --seeds 5 --start $at >> $out/$core.txt 2>&1; echo "rc $?" >> $out/$core.txt; at=$((at + 5)); done) &
  number=$((number + 1))
done
wait
cat $out/*.txt | python3 -c "
import re, sys
text = sys.stdin.read(); found = re.findall(r'^(\d+) seeds from (\d+): .* (\d+) violations', text, re.M)
print(sum(int(n) for n, _, _ in found), 'seeds,', sum(int(v) for _, _, v in found), 'violations, from', sorted({f // 10000 * 10000 for _, f, _ in ((n, int(f), v) for n, f, v in found)}))
bad = [line for line in text.splitlines() if not re.match(r'\d+ seeds from|rc', line)]
print('\n'.join(bad[:40])[:3000])"
