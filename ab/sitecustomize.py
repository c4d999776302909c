"""Experiments: samples the main thread of workers, by the step that they have told."""

import os
import sys
import threading
import time


def _run():
    from collections import Counter

    main = threading.main_thread().ident
    seen, began, steps, last, out = Counter(), time.time(), [], "", f"/tmp/ab/samples.{os.getpid()}"
    at = time.time()
    while True:
        time.sleep(0.01)
        step = open("/proc/self/comm").read().strip().split(" ")[0]
        now = time.time()
        if step != last:
            steps.append((round(now, 2), step))
            last = step
        frame, own, leaf = sys._current_frames().get(main), "", ""
        while frame is not None:
            code = frame.f_code
            name = f"{code.co_filename.split('/site-packages/')[-1].split('/root/')[-1][-44:]}:{frame.f_lineno}:{code.co_name}"
            if not leaf:
                leaf = name
            if (
                not own
                and any(f"/{it}/" in code.co_filename for it in ("worker", "kernels"))
                and "site-packages" not in code.co_filename
            ):
                own = name
            frame = frame.f_back
        seen[step, own, leaf] += 1
        if now - at > 1:
            at = now
            with open(out + ".part", "w") as f:
                print(os.getpid(), steps, file=f)
                for (s, o, l), n in seen.most_common(60):
                    print(n, s, o, "|", l, file=f)
            os.replace(out + ".part", out)
        if now - began > 100:
            return


if (
    any("hisparse.cli" in a for a in getattr(sys, "orig_argv", []))
    and "worker" in sys.orig_argv
    and os.environ.get("AB_SAMPLE")
):
    os.makedirs("/tmp/ab", exist_ok=True)
    threading.Thread(target=_run, daemon=True).start()
