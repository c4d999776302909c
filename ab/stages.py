"""Where requests of 3 tokens spend their time (argument: folder of logs), undisturbed and beside others."""
import glob, sys
moves, works, units = {}, {}, []
for name in glob.glob(f"{sys.argv[1]}/*.log"):
    of = {}
    for line in open(name):
        w = line.split()
        t = float(w[0])
        if w[1] == "move":
            moves.setdefault(0, []).append((t, int(w[2]), int(w[3]), w[4]))
        elif w[1] == "apply":
            works.setdefault(0, []).append((t, w[2], int(w[3]), int(w[4])))
        elif w[1] == "unit":
            units.append((t, int(w[2]), int(w[3]), float(w[4]), float(w[5])))
        else:
            works.setdefault(0, []).append((t, w[1], int(w[2]), -1))
live, done, hostile = {}, [], []
for t, index, tokens, event in sorted(moves[0]):
    if event == "submitted":
        live[index] = {"submitted": t, "tokens": tokens}
    at = live.get(index)
    if at is not None:
        at.setdefault(event, t)
        if event == "ended":
            at["index"] = index
            done.append(at)
            live.pop(index)
    if tokens > 100:
        hostile.append((t, event, index))
placements = {}
for t, kind, placement, index in sorted(works[0]):
    if kind == "Admit":
        placements[placement] = {"index": index, "Admit": t}
    elif placement in placements:
        placements[placement].setdefault(kind, t)
by_index = {}
for it in placements.values():
    by_index.setdefault(it["index"], []).append(it)
rows = []
for at in done:
    if at["tokens"] > 100:
        continue
    mine = [it for it in by_index.get(at["index"], ()) if at["submitted"] <= it["Admit"] <= at["ended"] and "leave" in it]
    if len(mine) != 1 or "first" not in mine[0] or "takeover" not in mine[0]:
        continue
    it = mine[0]
    marks = [at["submitted"], at["admitted"], it["Admit"], it["first"], it["takeover"], it["leave"], at["ended"]]
    near = [e for e in hostile if at["submitted"] - 0.2 <= e[0] <= at["ended"]]
    retracts = [e for e in near if e[1] in ("retract", "released") and at["submitted"] <= e[0] <= at["admitted"]]
    rows.append((bool(near), [1e3 * (b - a) for a, b in zip(marks, marks[1:])], [(e[1], round(1e3 * (e[0] - at["submitted"]), 1)) for e in retracts]))
names = "submitted>admitted admitted>applied applied>first first>joined joined>left left>ended".split()
for kind in (False, True):
    own = [r[1] for r in rows if r[0] == kind]
    if own:
        q = lambda xs, p: sorted(xs)[min(len(xs) - 1, int(p * len(xs)))]
        print("beside prompts" if kind else "undisturbed", len(own), " ".join(f"{n} {q([r[i] for r in own], .5):.1f}/{q([r[i] for r in own], .9):.1f}/{q([r[i] for r in own], .99):.1f}" for i, n in enumerate(names)), f"sum {q([sum(r) for r in own], .5):.1f}/{q([sum(r) for r in own], .9):.1f}/{q([sum(r) for r in own], .99):.1f}")
for r in sorted((r for r in rows if r[0]), key=lambda r: -sum(r[1]))[:8]:
    print("slow", " ".join(f"{x:.1f}" for x in r[1]), "victims", r[2])
for beside in (0, 1):
    own = [u for u in units if u[1] == beside]
    for low, high in ((1, 8), (9, 64), (65, 256), (257, 512)):
        ms = sorted(u[3] for u in own if low <= u[2] <= high)
        if ms:
            print("units", "beside steps" if beside else "alone", f"{low}-{high} rows", len(ms), f"ms {ms[len(ms) // 2]:.2f}/{ms[int(.99 * len(ms))]:.2f}")
if units:
    print("plain step ms", units[-1][4])
