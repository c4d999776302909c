#!/bin/bash
# One worker on a card, killed under load: with a standby, then without one. At most 200 s.
export PYTHONPATH=$PYTHONPATH:$PWD/ab HISPARSE_KERNEL_CACHE=/tmp/ab-kernels
export TRITON_CACHE_DIR=/tmp/ab-triton
began=$SECONDS
(python3 -X importtime -c "import worker.process" 2>/tmp/imp-cold.txt; python3 -X importtime -c "import worker.process" 2>/tmp/imp.txt; python3 -X importtime -c "import transformers.models.deepseek_v32.modeling_deepseek_v32" 2>/tmp/imp-tr.txt) &
python3 -m hisparse.cli model synth /tmp/ab-model --like deepseek-v3.2 --layers 6 --experts 64 2>&1 | tail -2 | cut -c1-300
wait
echo "model $((SECONDS - began)) s; $(du -sm /tmp/ab-model | cut -f1) MB"
python3 - <<'P'
import re
def tree(path, least, depth):
    rows=[]
    for l in open(path, errors="replace"):
        m=re.match(r'import time:\s+(\d+) \|\s+(\d+) \|(\s+)(\S+)',l)
        if m: rows.append((len(m[3])//2,int(m[2])//1000,m[4]))
    print(path, " ".join(f"{'>'*d}{n}={c}" for d,c,n in rows[::-1] if c>least and d<depth)[:1500])
tree("/tmp/imp-cold.txt", 500, 4); tree("/tmp/imp.txt", 120, 8); tree("/tmp/imp-tr.txt", 300, 5)
P
timeout $((195 - SECONDS + began)) python3 ab/kills.py /tmp/ab-model standby,restart 2>&1 | cut -c1-420
for f in $(ls -t /tmp/ab/samples.* | grep -v part | head -3); do echo "== $f"; head -c 700 $f | head -1; sed -n 2,16p $f | cut -c1-190; done
echo "in all $((SECONDS - began)) s"
