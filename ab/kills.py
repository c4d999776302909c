"""Kills of a worker under load: takeover by a standby, then a plain restart. kills.py MODEL DETERMINISTIC"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hisparse

MODEL = sys.argv[1]
VOCAB = json.loads((Path(MODEL) / "config.json").read_text())["vocab_size"]
DEVICE = os.environ.get("DEVICE", "cuda")
POOL = os.environ.get("POOL", "12GiB")
COUNT = int(os.environ.get("COUNT", "500"))
T0 = time.monotonic()


def say(*a):
    print(f"[{time.monotonic() - T0:6.1f}]", *a, flush=True)


def prompt(seed, size):
    return random.Random(seed).choices(range(VOCAB), k=size)


class Up:
    def __init__(self, *extra, env=None):
        self.dir = Path(tempfile.mkdtemp(prefix="svc"))
        self.ready, self.logfile = self.dir / "ready.json", self.dir / "log"
        memory = ["--device-mem", "auto"] if DEVICE != "cpu" else ["--device-mem", "256MiB"]
        command = [
            sys.executable,
            "-m",
            "hisparse.cli",
            "up",
            "--model",
            MODEL,
            "--device",
            DEVICE,
            *memory,
            "--host-mem",
            POOL,
            "--seats",
            "32",
            "--ready-file",
            str(self.ready),
            "--set",
            f"cluster.runtime_dir={self.dir}/rt",
            "--set",
            "worker.deterministic=true",
            *extra,
        ]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdout=open(self.logfile, "w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | (env or {}),
        )

    def log(self):
        return self.logfile.read_text()

    def until(self, text, count=1, limit=110):
        end = time.monotonic() + limit
        while self.log().count(text) < count:
            if self.process.poll() is not None or time.monotonic() > end:
                print(self.log()[-2500:], flush=True)
                raise SystemExit(f"never said {text!r}")
            time.sleep(0.02)
        return time.monotonic() - self.began

    def wait(self):
        while not self.ready.exists():
            if self.process.poll() is not None or time.monotonic() - self.began > 150:
                print(self.log()[-3000:], flush=True)
                raise SystemExit("not ready")
            time.sleep(0.02)
        return time.monotonic() - self.began

    @property
    def info(self):
        return json.loads(self.ready.read_text())

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


async def one(client, tokens, count, times, out, key):
    stream = await client.submit(tokens, hisparse.Sampling(max_tokens=count, ignore_eos=True))
    got = []
    async for some in stream:
        got += some.tolist()
        times.append((time.monotonic(), len(some)))
    out[key] = got


async def round_of(client, up=None):
    sizes = [1024 + 37 * i for i in range(12)] if DEVICE != "cpu" else [100 + 7 * i for i in range(6)]
    out, times, killed = {}, [[] for _ in sizes], 0.0
    tasks = [asyncio.create_task(one(client, prompt(f"k{i}", n), COUNT, times[i], out, i)) for i, n in enumerate(sizes)]
    if up is not None:
        while not all(len(t) > 3 for t in times):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        pid = up.info["workers"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        killed, wall = time.monotonic(), time.time()
        say(f"SIGKILL of {pid} at {wall:.2f}")
    await asyncio.gather(*tasks)
    if up is not None:
        nexts = sorted(next(at for at, _ in t if at > killed + 0.25) - killed for t in times)
        gaps = sorted(max(b[0] - a[0] for a, b in zip(t, t[1:])) for t in times)
        behind = sorted(b[0] - a[0] for t in times for a, b in zip(t, t[1:]) if a[0] > killed + 0.3)
        say(
            f"next token of each stream after {nexts[0]:.2f} to {nexts[-1]:.2f} s; longest pause {gaps[0]:.2f} to {gaps[-1]:.2f}; gaps behind it p50 {behind[len(behind) // 2] * 1e3:.0f} p90 {behind[int(0.9 * len(behind))] * 1e3:.0f} p99 {behind[int(0.99 * len(behind))] * 1e3:.0f} max {behind[-1] * 1e3:.0f} ms"
        )
    return out


def memory():
    if DEVICE == "cpu":
        return
    text = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout
    say("device memory by process:", text.strip().replace("\n", "; "))


def rss(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return " ".join(l.replace("\t", "") for l in lines if l.startswith(("VmRSS", "RssAnon", "RssShmem", "RssFile")))


async def drive(up, kills):
    endpoint = up.info["client_endpoint"]
    async with hisparse.open_client(endpoint) as client:
        began = time.monotonic()
        times = []
        await one(client, prompt("f", 64), 2, times, {}, 0)
        say(f"first token {times[0][0] - began:.2f} s after submit, {times[0][0] - up.began:.2f} after the start of up")
        calm = await round_of(client)
        for number, kind in enumerate(kills):
            if kind == "standby":
                up.until("standby of w0 is ready", 1 + kills[:number].count("standby"))
                say(f"standby ready {time.monotonic() - up.began:.1f} s after start of up")
                memory()
                say(rss(up.info["standbys"][0]["pid"]))
            say("kill with", kind)
            out = await round_of(client, up)
            say(f"{sum(out[i] != calm[i] for i in out)} of {len(out)} differ, {sum(map(len, out.values()))} tokens")


def report(up, count):
    keep = ("ready to take over", "takes over", "weights loaded", "weights attached", "weights mapped", "weights kept", "weights held", "host pool", "graphs captured", "welcomed", "killed", "standby of", "device_bytes_left", "does not")
    lines = [l for l in up.log().splitlines() if any(k in l for k in keep)]
    print("\n".join(l[11:150] for l in lines[-count:]), flush=True)

def life(kills, env, count, *extra):
    up = Up(*extra, env=env)
    try:
        say(f"ready {up.wait():.1f} s after the start of up {extra}")
        asyncio.run(drive(up, kills))
    except BaseException as error:
        say("FAILED", repr(error)); print(up.log()[-2500:], flush=True)
    finally:
        report(up, count)
        up.stop()

def main():
    limit, base = float(sys.argv[2]), sys.argv[3:]
    life(["standby", "restart"], {"AB_SAMPLE": "1"}, 34, *base)
    say("=== without a keeper")
    if time.monotonic() - T0 < limit - 25:
        life(["standby"] if time.monotonic() - T0 < limit - 55 else [], {}, 14, *base, "--set", "worker.keeper=false")
main()
