#!/bin/bash
# One worker of 10.5 GB on a card, killed under load: taken over by a standby, then started again. At most 190 s.
export PYTHONPATH=$PYTHONPATH:$PWD/ab HISPARSE_KERNEL_CACHE=/tmp/ab-kernels TOKENIZERS_PARALLELISM=false BEGAN=$(date +%s)
began=$SECONDS
mkdir -p /tmp/ab-model
python3 - /tmp/ab-model <<'P' 2>&1 | tail -3 | cut -c1-300
source = open("ab/card.py").read().split("def smi")[0]
exec(compile(source, "ab/card.py", "exec"))
make()
P
echo "model $((SECONDS - began)) s; $(du -sm /tmp/ab-model | cut -f1) MB; $(nproc) cores"
left=$((184 - SECONDS + began))
COUNT=300 timeout -s INT $left python3 ab/kills.py /tmp/ab-model/ck $left 2>&1 | cut -c1-400
for f in $(grep -l "takes" /tmp/ab/samples.* | grep -v part | head -1) $(ls -tr /tmp/ab/samples.* | grep -v part | tail -2 | head -1); do echo "== $f"; head -1 $f | cut -c1-600; grep -E "^[0-9]+ (takes|model|weights|pool|device) " $f | head -22 | cut -c1-200; done
rm -rf /tmp/ab-model
echo "in all $((SECONDS - began)) s"
