"""Variants of the decode index, in turn."""
import ctypes, itertools, os, statistics, sys, time, traceback
from kernels.cuda import index_topk as m

DEFAULT = dict(DIR="kernels/cuda/src")
V = {"base": dict(DIR="ab/main"), "D": {}, "CL": dict(DIR="ab/cl"), "X": dict(DIR="ab/clx")}
import kernels.cuda.jit as jit
from pathlib import Path
was = m.Indexer.shared_bytes
m.Indexer.shared_bytes = lambda self, arch: was(self, arch) + (2048 if self.on_hopper(arch) else 0)
GOAL = {(8192,1):8.4,(8192,16):14.0,(8192,64):28.3,(32768,1):13.2,(32768,16):31.3,(32768,64):86.6,(131072,1):16.7,(131072,16):86.5,(131072,64):299}

def fresh(name, **more):
    for key, value in {**DEFAULT, **V[name], **more}.items():
        if key == "DIR": jit.SOURCE_DIR = Path(value); jit.load.cache_clear(); jit._module.cache_clear(); continue
        assert hasattr(m, key), key
        setattr(m, key, value)
    m._kernels.cache_clear()

def compile_all(part):
    from kernels.cuda.jit import cached_unit, cache_dir
    todo = []
    for name in V:
        fresh(name)
        for unit, defines in (("index_hopper", m.Indexer(64,128,2,1).defines(90)), ("index_select", m.select_defines())):
            todo.append((V[name].get("DIR"), unit, defines))
    for i, (d, unit, defines) in enumerate(todo):
        jit.SOURCE_DIR = Path(d or "kernels/cuda/src")
        if i % part[1] == part[0]: cached_unit(unit, defines, "sm_90", cache_dir())
    print(len(todo), "units")

LATE = """
struct P { int* to; const int* from; int count; };
extern "C" __global__ void late(const __grid_constant__ P p) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const long long begin = clock64();
    while (clock64() - begin < 60000) {}
    if (threadIdx.x < p.count) p.to[threadIdx.x] = p.from[threadIdx.x];
}
"""
class P3(ctypes.Structure):
    _fields_ = [("to", ctypes.c_uint64), ("src", ctypes.c_uint64), ("count", ctypes.c_int32)]

def late(tensor, wrong):
    """`tensor` holds `wrong` until a kernel that lets the next begin early has run for a while."""
    import torch
    from kernels.cuda import jit
    if not hasattr(late, "kernel"):
        torch.cuda.synchronize()
        driver = jit._bindings("driver")
        module = jit._call(driver.cuModuleLoadData, jit.compile_source(LATE, "late", (), "sm_90").cubin)
        late.kernel = jit.Kernel(module, "late")
    flat = tensor.view(-1)
    right = flat.clone(); flat.copy_(torch.full_like(flat, wrong)); torch.cuda.synchronize()
    late.kernel.launch((1, 1), P3(flat.data_ptr(), right.data_ptr(), min(512, len(flat))), torch.cuda.current_stream().cuda_stream, threads=512)
    return right

def check():
    from tests.gpu.index_bench import IndexBench
    for name in ("D", "X"):
        fresh(name)
        done = 0
        try:
            for lengths in ([8192], [9000, 100, 33_001, 2049, 5000], [131_072], [300_001], [131_072] * 8, [8192] * 64, list(range(2040, 2075)), [2500 + 37 * i for i in range(90)], [40, 3000] * 16, [1_048_576]):
                bench = IndexBench(lengths, kind="fp8", heads=64, dim=128, k=2048, seed=4, padding=len(lengths) % 3)
                bench.check()
                bench.check()
                done += 1
            for lengths in ([8192], [9000, 100, 33_001, 2049, 5000]):
                bench = IndexBench(lengths, kind="fp8", heads=64, dim=128, k=2048, seed=4)
                bench.check()
                kept = late(bench.batch.lengths, 3000); bench.check()
                kept = late(bench.batch.num_real, 0); bench.check()
                kept = late(bench.state.hot_slots, -1); bench.check()
                if len(lengths) == 1: kept = late(bench.state.index_table, 0); bench.check()
                done += 1
            b = IndexBench([5000, 200_000, 8000], kind="fp8", heads=64, dim=128, k=2048, seed=1)
            b.state.index_keys[1].zero_(); b.check(); done += 1
            b = IndexBench([5000, 8000], kind="fp8", heads=64, dim=128, k=2048, seed=1)
            b.state.index_table[int(b.seats[0]), 3] = -1
            for turn in range(3):
                out = b.run()
                assert bool((out[0] == -1).all()) and bool((out[1] >= 0).all()), "ungranted"
            assert not m.scratch_of(b.state).counters.any() and not m.scratch_of(b.state).histogram.any()
            done += 1
            print(name, "exact in", done, flush=True)
        except Exception as problem:
            print(name, "WRONG behind", done, repr(problem)[:200], flush=True)

def check_cell(cell, b, name):
    from kernels.reference.index_topk import top_positions
    import torch
    scratch = b.scratch_of(cell.state)
    wrong = 0
    for row in range(0, cell.rows, max(1, cell.rows // 6)):
        want = top_positions(scratch.scores[row * cell.context :][: cell.context], b.TOPK).int()
        wrong += not torch.equal(want, cell.out[row])
    left = bool(scratch.histogram.any()) + bool(scratch.counters.any())
    if wrong or left: print("WRONG", name, cell.context, cell.rows, wrong, left, flush=True)

def apart(cell, b, work):
    """Launches with a kernel between them that lets none begin early; less that kernel's own time."""
    import torch
    small = torch.zeros(256, device="cuda")
    def both(group):
        small.add_(1); work(group)
    def alone(group): small.add_(1)
    w = statistics.median(b.timed(b.capture(both, cell.groups).replay, cell.groups))
    return w, statistics.median(b.timed(b.capture(alone, cell.groups).replay, cell.groups))

def times():
    import torch
    from benchmarks import index_topk as b
    b.REPLAYS, b.KEY_BYTES_MOST = 13, 4 << 30
    began = time.monotonic()
    print("columns:", " ".join(V), "| scores alone, likewise | apart base D X")
    for context, batch in itertools.product((8192, 131072, 32768), (1, 64, 16)):
        if time.monotonic() - began > float(os.environ.get("LEFT", 40)): print("out of time"); return
        fresh("base")
        cell = b.Cell("fp8", context, batch)
        whole, only = {n: [] for n in V}, {}
        graphs = {}
        for name in V:
            try:
                fresh(name)
                cell.whole(0); torch.cuda.synchronize()
                graphs[name] = b.capture(cell.whole, cell.groups)
            except Exception as problem:
                print("FAILED", name, repr(problem)[:150], flush=True)
        for turn in range(3):
            for name, graph in graphs.items():
                whole[name] += b.timed(graph.replay, cell.groups)
                if turn == 0: check_cell(cell, b, name)
        for name in V:
            fresh(name); cell.whole(0)
            only[name] = statistics.median(b.timed(b.capture(cell.scores, cell.groups).replay, cell.groups))
            b.scratch_of(cell.state).histogram.zero_(); b.scratch_of(cell.state).counters.zero_()
        far = []
        for name in ("base", "D", "X"):
            fresh(name); cell.whole(0); far.append("%.1f(%.1f)" % apart(cell, b, cell.whole))
        print(f"{context // 1024}k x {batch} [{GOAL[context, batch]}]:", " ".join(f"{statistics.median(w):.2f}" if w else "-" for w in whole.values()),
              "|", " ".join(f"{v:.2f}" for v in only.values()), "|", " ".join(far), flush=True)
        del graphs, cell
        torch.cuda.empty_cache()

def probe():
    import torch
    from benchmarks import index_topk as b
    from kernels.cuda import jit
    driver = jit._bindings("driver")
    for context, batch in ((8192, 1), (8192, 64), (131072, 1)):
        cell = None
        for name in ("base", "RW"):
            fresh(name, PROBE=1)
            cell = cell or b.Cell("fp8", context, batch)
            cell.whole(0); torch.cuda.synchronize()
            graph = b.capture(cell.whole, cell.groups)
            lines = []
            for turn in range(9):
                graph.replay(); torch.cuda.synchronize()
                found = []
                arch = 90
                indexer = m.Indexer(64, 128, 2, 1)
                for unit, defines in (("index_hopper", indexer.defines(arch)), ("index_select", m.select_defines() + (("FLAG", m.FLAG), ("PROBE", 1)))):
                    module = jit._module(unit, defines, 0)
                    pointer = jit._call(driver.cuModuleGetGlobal, module, b"probe_times")
                    host = (ctypes.c_uint32 * (256 * 16))()
                    jit._call(driver.cuMemcpyDtoH, ctypes.addressof(host), pointer, ctypes.sizeof(host))
                    found.append(torch.tensor(list(host), dtype=torch.int64).view(256, 16))
                    jit._call(driver.cuMemsetD8, pointer, 0, ctypes.sizeof(host))
                origin = int(found[0][:132, 0][found[0][:132, 0] > 0].min())
                line = []
                for times in found:
                    for mark in range(10):
                        at = times[:, mark][times[:, mark] > 0] - origin
                        line += [int(at.min()), int(at.float().median()), int(at.max())] if len(at) else [-1, -1, -1]
                lines.append(line)
            middle = torch.tensor(lines).float().median(0).values.int().tolist()
            for kernel in (0, 1):
                print(f"{context // 1024}k x {batch} {name} {'score select'.split()[kernel]}:", " ".join(f"{mark}:{'/'.join(map(str, middle[30 * kernel + 3 * mark :][:3]))}" for mark in range(10)), flush=True)

if __name__ == "__main__":
    what = sys.argv[1]
    try:
        compile_all(tuple(map(int, sys.argv[2:4]))) if what == "compile" else {"check": check, "times": times, "probe": probe}[what]()
    except Exception:
        traceback.print_exc(limit=4)
