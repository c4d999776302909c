"""See card.sh. card.py DIR"""
import hashlib, json, os, signal, socket, subprocess, sys, time
from pathlib import Path

ROLE = os.environ.get("ROLE", "main")
BEGAN = float(os.environ.get("BEGAN", time.time()))
DIR = Path(sys.argv[1])
CK, SOCK = DIR / "ck", DIR / "w.sock"
DEVICE = os.environ.get("DEVICE", "cuda")
LEFT = lambda: 39 - (time.time() - BEGAN)


def say(*a):
    print(f"[{time.time() - BEGAN:6.1f}]", ROLE, *a, flush=True)


def make():
    import torch
    from worker.weights.layout import scale_shape, tensors_of
    from worker.weights.synth import published_config, normal_quantiles
    from worker.weights.writing import write_repository, PIECE_VALUES
    import worker.weights.synth as synth

    small = DEVICE == "cpu"
    if small:
        from worker.runners.tiny import write_tiny_checkpoint
        write_tiny_checkpoint(CK, fp8=True)
        return
    config = published_config("deepseek-v3.2", layers=6, experts=32)
    if os.environ.get("SHRINK"):
        config.vocab_size, config.hidden_size, config.intermediate_size, config.moe_intermediate_size = 2000, 1024, 1024, 256

    class Cheap:
        def __init__(self):
            g = torch.Generator().manual_seed(1)
            self.normal = torch.randn(PIECE_VALUES * 2, generator=g).bfloat16()
            self.codes = normal_quantiles()[torch.randint(0, 256, (PIECE_VALUES * 2,), generator=g)]
        def _of(self, pool, spec, first, count):
            n = count * spec.shape[1]
            at = (hash((spec.name, first)) & 0xFFFF) * 128 % (len(pool) - n) if len(pool) > n else 0
            return pool[at:at + n].view(count, spec.shape[1])
        def plain(self, spec, first, count):
            if len(spec.shape) == 1:
                return torch.ones(spec.shape) if spec.name.endswith("norm.weight") else torch.zeros(spec.shape)
            return self._of(self.normal, spec, first, count) * (1 / spec.shape[1] ** 0.5)
        def values(self, spec, first, count):
            return self._of(self.codes, spec, first, count).view(torch.float8_e4m3fn)
        def scales(self, spec, first, count):
            return torch.full(scale_shape((count, spec.shape[1]), (128, 128)), 2.0 ** round(torch.log2(torch.tensor(1 / (128 * spec.shape[1] ** 0.5))).item()))

    about = json.loads(config.to_json_string(use_diff=False))
    source = Cheap()
    total = write_repository(CK, about, tensors_of(config), source, fp8=True, powers_of_two=True, shard_bytes=2 << 30)
    say(f"checkpoint of {total / 1e9:.2f} GB written")


def smi():
    if DEVICE == "cpu":
        return ""
    q = lambda *a: subprocess.run(["nvidia-smi", *a, "--format=csv,noheader,nounits"], capture_output=True, text=True).stdout.split("\n")
    used = q("--query-gpu=memory.used")[0]
    apps = [x for x in q("--query-compute-apps=pid,used_memory") if x]
    return f"memory used {used} MiB, by process: {apps}"


def digest(runner):
    import torch
    import gc
    layers = runner._layers
    tensors = dict(layers.model.state_dict())
    for i, module in enumerate(layers.model.modules()):
        for name in ("weights",):
            for j, w in enumerate(getattr(module, name, None) or [] if type(module).__name__ == "BlockExperts" else []):
                tensors[f"e{i}.{j}.v"], tensors[f"e{i}.{j}.s"] = w.values, w.scales
        if type(module).__name__ == "BlockLinear":
            tensors[f"l{i}.v"], tensors[f"l{i}.s"] = module.block_weight.values, module.block_weight.scales
    for layer in layers._held:
        tensors[f"a{layer.number}.k"], tensors[f"a{layer.number}.v"] = layer.absorbed.key, layer.absorbed.value
    found, total = [], 0
    for name, t in tensors.items():
        raw = t.reshape(-1).view(torch.uint8)
        total += raw.numel()
        n = raw.numel() // 8 * 8
        found.append((name, int(raw[:n].view(torch.int64).sum()), int(raw[n:].sum())))
    return hashlib.blake2b(repr(found).encode(), digest_size=6).hexdigest(), total, len(found)


def user(kind):
    t0 = time.monotonic()
    import torch
    from protocol import logs
    from worker.runners.transformers_dsa import load_runner
    from protocol.settings import WorkerSettings
    logs.configure("info", "logfmt")
    t1 = time.monotonic()
    if DEVICE != "cpu":
        torch.zeros(1, device=DEVICE); torch.cuda.synchronize()
    t2 = time.monotonic()
    settings = WorkerSettings(model=str(CK), device=DEVICE, dtype="bfloat16" if DEVICE != "cpu" else "auto", matmul="weight_only")
    if kind == "noro":  # as with a driver that maps for writing alone
        import worker.keeper.mapping as m
        def keep_writable(self):
            f = self._driver.CUmemAccess_flags
            self._allow(0, self.bytes, f.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        m.GpuMapping.protect = keep_writable
    runner = load_runner(settings, None, SOCK)
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    t3 = time.monotonic()
    d0 = time.monotonic(); d = digest(runner); d1 = time.monotonic()
    say(f"import {t1 - t0:.2f} context {t2 - t1:.2f} load_runner {t3 - t2:.3f} s {runner.weights_seconds} digest {d} in {d1 - d0:.2f}")
    say(smi())
    big = runner._layers.model.lm_head.weight
    if kind in ("fill", "kill"):
        (DIR / f"ready-{kind}").touch()
        x = torch.ones(64, big.shape[1], dtype=big.dtype, device=DEVICE)
        while True:
            (x @ big.t()).sum()
    if kind == "fault" or kind == "noro":
        before = big[0, 0].clone()
        try:
            big.view(torch.uint8)[0, 0] = 77
            if DEVICE != "cpu": torch.cuda.synchronize()
            say("WRITE WENT THROUGH")
        except Exception as e:
            say("write refused:", str(e)[:120].replace("\n", " "))
        os._exit(3)


def sweep(runner, rows=16):
    """Products of a decode step with all weights: a graph, and its bytes."""
    import torch
    from worker.weights.modules import BlockExperts, BlockLinear
    model, calls, total = runner._layers.model, [], 0
    g = torch.Generator("cuda").manual_seed(3)
    draw = lambda k: torch.randn(rows, k, generator=g, device="cuda", dtype=torch.bfloat16)
    for m in model.modules():
        if isinstance(m, BlockLinear) and m.joined is None:
            calls.append((m, (draw(m.in_features),))); total += m.block_weight.nbytes
        elif isinstance(m, BlockExperts):
            chosen = torch.rand(rows, m.total, generator=g, device="cuda").topk(8, 1).indices.int()
            calls.append((m, (draw(m.weights[0].values.shape[2]), chosen, torch.full((rows, 8), 0.1, device="cuda", dtype=torch.bfloat16))))
            total += sum(w.nbytes for w in m.weights)
    calls.append((model.lm_head, (draw(model.config.hidden_size),))); total += model.lm_head.weight.nbytes
    with torch.inference_mode():
        for _ in range(2):
            out = [m(*a) for m, a in calls]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = [m(*a) for m, a in calls]
    return graph, out, total


def bench():
    import torch
    import worker.process
    from transformers import AutoConfig
    from protocol import logs
    from protocol.settings import WorkerSettings
    from worker.runners.transformers_dsa import load_runner
    from worker.weights.model import empty_model
    torch.zeros(1, device="cuda"); logs.configure("info", "logfmt")
    say("imported, context")
    while not (CK / "config.json").exists() or not (DIR / "made").exists():
        time.sleep(0.05)
    about = AutoConfig.from_pretrained(CK)
    if hasattr(about, "quantization_config"):
        del about.quantization_config
    t = time.monotonic(); empty_model(about, torch.bfloat16); say(f"library's modules imported and made {time.monotonic() - t:.2f} s")
    t = time.monotonic(); empty_model(about, torch.bfloat16); say(f"made again {time.monotonic() - t:.3f} s")
    settings = WorkerSettings(model=str(CK), device="cuda:0", dtype="bfloat16", matmul="weight_only")
    runners = {}
    for name, keeper in (("own", None), ("filled", SOCK), ("mapped", SOCK), ("mapped", SOCK), ("mapped", SOCK)):
        free = torch.cuda.mem_get_info()[0]
        t = time.monotonic(); runner = load_runner(settings, None, keeper); torch.cuda.synchronize(); took = time.monotonic() - t
        say(f"{name}: load_runner {took:.3f} s {runner.weights_seconds}, device memory {(free - torch.cuda.mem_get_info()[0]) / 2**20:.0f} MiB")
        if name != "filled":
            runners[name] = runner
        del runner
    say("digests", [digest(it) for it in runners.values()])
    graphs = {k: sweep(v) for k, v in runners.items()}
    for graph, _, _ in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    say("outputs equal", all(torch.equal(a, b) for a, b in zip(graphs["own"][1], graphs["mapped"][1])), f"{graphs['own'][2] / 1e9:.2f} GB a sweep")
    found = {k: [] for k in graphs}
    for turn in range(40):
        for name in (("own", "mapped") if turn % 2 else ("mapped", "own")):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record(); [graphs[name][0].replay() for _ in range(5)]; b.record(); b.synchronize()
            found[name].append(a.elapsed_time(b) / 5)
        if LEFT() < 1:
            break
    for k, v in found.items():
        v.sort()
        say(f"{k}: sweep ms median {v[len(v) // 2]:.4f} min {v[0]:.4f} max {v[-1]:.4f} of {len(v)}")


def spawn(role):
    return subprocess.Popen([sys.executable, __file__, str(DIR)], env=os.environ | {"ROLE": role, "BEGAN": str(BEGAN)})


def wait(role, limit=60, kill_when=None):
    p = spawn(role)
    if kill_when:
        end = time.time() + limit
        while not (DIR / kill_when).exists() and time.time() < end and p.poll() is None:
            time.sleep(0.05)
        time.sleep(0.5)
        p.send_signal(signal.SIGKILL)
    try:
        p.wait(max(1, min(limit, LEFT())))
    except subprocess.TimeoutExpired:
        p.kill(); p.wait(); say(role, "TIMED OUT")
    say(f"{role}: exit {p.returncode}; {smi()}")


def keeper():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as l:
        SOCK.unlink(missing_ok=True)
        l.bind(str(SOCK)); l.listen()
        return subprocess.Popen([sys.executable, "-m", "hisparse.cluster.weights", str(l.fileno()), str(os.getpid()), "info", "logfmt", "w0"], pass_fds=(l.fileno(),))


def main():
    keep, bencher = keeper(), spawn("bench")
    make()
    (DIR / "made").touch()
    try:
        bencher.wait(max(1, LEFT()))
    except subprocess.TimeoutExpired:
        say("TIMED OUT")
    finally:
        bencher.kill(); bencher.wait(); keep.kill(); keep.wait()


if ROLE == "main":
    main()
elif ROLE == "bench":
    bench()
else:
    user(ROLE.split("-")[1])
