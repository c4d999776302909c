"""Summary of an ncu report: python ab/prof.py REPORT TAG"""
import subprocess, csv, io, sys, re
rep, tag, top = sys.argv[1:]
raw = subprocess.run(["ncu", "--import", rep, "--page", "raw", "--csv"], capture_output=True, text=True).stdout
rows = list(csv.reader(io.StringIO(raw)))
want = re.compile(r"gpu__time_duration.sum|launch__registers|launch__waves|sm__cycles_elapsed.max|pipe_tensor.*cycles_active.*pct|inst_executed_pipe_(alu|fma|xu|lsu|uniform|tensor\S*).*pct|l1tex__data_pipe_lsu_wavefronts.*pct|l1tex__data_bank.*pct|smsp__issue_active.avg.pct|lts__t_sector_hit_rate.pct|dram__throughput.*pct|sm__throughput.avg.pct|lts__throughput.*pct|l1tex__throughput.*pct|issue_active")
if len(rows) > 2:
    d = dict(zip(rows[0], rows[2])); 
    print(tag, "; ".join(f"{k.replace('.avg.pct_of_peak_sustained_active','%').replace('.avg.pct_of_peak_sustained_elapsed','%e')}={v}" for k, v in d.items() if want.search(k))[:620])
src = subprocess.run(["ncu", "--import", rep, "--page", "source", "--csv"], capture_output=True, text=True).stdout
rows = list(csv.reader(io.StringIO(src)))
h = next((i for i, r in enumerate(rows) if "Source" in r), None)
if h is not None:
    head = rows[h]; si = head.index("Source"); ci = next(i for i, c in enumerate(head) if "Samples" in c or "Sampling" in c)
    stall = [i for i, c in enumerate(head) if c.startswith("stall_") and "not_issued" not in c.lower()]
    data = [(n, r[si], float(r[ci] or 0), r) for n, r in enumerate(rows[h + 1:]) if len(r) == len(head)]
    total = sum(x[2] for x in data) or 1
    print(tag, "instructions", len(data), "samples", total)
    for n, s, v, r in sorted(sorted(data, key=lambda x: -x[2])[:int(top)]):
        st = sorted(((float(r[i] or 0), head[i][6:]) for i in stall), reverse=True)[:2]
        print(f"  {n:5} {100*v/total:4.1f}% {s[:50]:50} {' '.join(f'{b}:{a:.0f}' for a, b in st)}")
else: print(tag, "no source page", src[:200])
