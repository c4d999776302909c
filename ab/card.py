"""See card.sh. card.py DIR"""
import hashlib, json, os, signal, socket, subprocess, sys, time
from pathlib import Path

ROLE = os.environ.get("ROLE", "main")
BEGAN = float(os.environ.get("BEGAN", time.time()))
DIR = Path(sys.argv[1])
CK, SOCK = DIR / "ck", DIR / "w.sock"
DEVICE = os.environ.get("DEVICE", "cuda")
LEFT = lambda: 143 - (time.time() - BEGAN)


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


def bench():
    import gc
    import torch
    from unittest.mock import patch
    from contextlib import suppress
    from benchmarks import decode
    from benchmarks.decode import Cell, make_pool, run
    from protocol.settings import WorkerSettings
    from worker.runners import transformers_dsa
    from worker.runners.transformers_dsa import load_runner
    settings = WorkerSettings(model=str(CK), device="cuda:0", dtype="bfloat16", matmul="weight_only")
    own = load_runner(settings)
    free0 = torch.cuda.mem_get_info()[0]
    mapped = load_runner(settings, None, SOCK)
    say("plain", own.weights_seconds, digest(own)); say("mapped", mapped.weights_seconds, digest(mapped))
    say(f"device memory that a second process's mapping takes: {(free0 - torch.cuda.mem_get_info()[0]) / 2**20:.0f} MiB")
    config = own._layers.model.config
    pool = make_pool(own.geometry, config, 4)
    rows = {"own": [], "mapped": []}
    with patch.object(transformers_dsa, "PREPARED_ROWS", [16]), patch.object(decode, "STEPS", 40):
        for turn in range(3):
            for name, runner in (("own", own), ("mapped", mapped)) if turn % 2 == 0 else (("mapped", mapped), ("own", own)):
                if LEFT() < 12 and rows["own"] and rows["mapped"]:
                    continue
                row = run(Cell(8192, "resident", 16, 0.99), runner, pool, 4096)
                rows[name].append(row["step_ms"])
                say(name, f"step {row['step_ms']:.3f} ms p50 {row['itl_p50_ms']:.3f}", {k: round(v, 2) for k, v in row["parts_ms"].items()})
                gc.collect(); torch.cuda.empty_cache()
    say({k: [round(x, 3) for x in v] for k, v in rows.items()})


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
    say("before:", smi())
    make()
    keep = keeper()
    try:
        wait("user-fill", 60, "ready-fill")
        wait("user-kill", 40, "ready-kill")
        wait("user-fault", 30)
        wait("user-noro", 30)      # the mapping is writable, its write goes through
        status = Path(f"/proc/{keep.pid}/status").read_text()
        say("keeper RSS", status.split("VmRSS:")[1].split("\n")[0].strip())
        # what 'noro' wrote must be found where memory cannot be protected
        wait("user-noro", 30)
        if DEVICE != "cpu" and LEFT() > 20:
            wait("bench", LEFT())
    finally:
        keep.kill(); keep.wait()
        time.sleep(0.5)
        say("after the keeper's SIGKILL:", smi())


if ROLE == "main":
    main()
elif ROLE == "bench":
    bench()
else:
    user(ROLE.split("-")[1])
