"""`python -m tests.sim --seeds N --start S` runs seeds S..S+N-1; `--seed N` replays one, `-v` with its trace.

The last line is a summary. Exits with 1 when any seed broke an invariant; each such seed is printed with the last
events before it.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Final

from tests.sim.run import Result, simulate
from tests.sim.trace import TAIL_LINES, Violation

#: New objects between two collections.
GC_YOUNG: Final = 20_000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="replay this one alone")
    parser.add_argument("--no-faults", action="store_true", help="the same workload, undisturbed")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the whole trace")
    options = parser.parse_args(arguments)
    gc.freeze()  # no collection looks at what is imported: a tenth of a seed's time
    gc.set_threshold(GC_YOUNG)  # another tenth
    if options.seed is not None:
        return _replay(options.seed, faults=not options.no_faults, verbose=options.verbose)
    return _batch(range(options.start, options.start + options.seeds), faults=not options.no_faults)


def _replay(seed: int, *, faults: bool, verbose: bool) -> int:
    result = simulate(seed, faults=faults)
    if verbose:
        print("\n".join(result.trace.lines()))
    if result.violation is not None:
        _show(result, 0 if verbose else TAIL_LINES)
    print(
        f"seed {seed}: {result.faults} faults, {result.simulated_s:.1f} simulated s in {result.seconds:.3f} s, "
        f"{result.name or 'no violation'}, trace {result.trace.digest()[:16]}"
    )
    return 1 if result.violation is not None else 0


def _batch(seeds: range, *, faults: bool) -> int:
    began, count, violations = time.perf_counter(), 0, 0
    for seed in seeds:
        result = simulate(seed, faults=faults)
        count += result.faults
        if result.violation is not None:
            violations += 1
            _show(result, TAIL_LINES)
    seconds = time.perf_counter() - began
    print(
        f"{len(seeds)} seeds from {seeds.start}: {count / len(seeds):.1f} faults a seed, {seconds:.1f} s "
        f"({1e3 * seconds / len(seeds):.0f} ms a seed), {violations} violations"
    )
    return 1 if violations else 0


def _show(result: Result, lines: int) -> None:
    print(f"---- seed {result.seed}: the last {lines} events")
    print("\n".join(result.trace.lines(lines)) if lines else "")
    violation = result.violation
    if violation is not None and not isinstance(violation, Violation):
        traceback.print_exception(violation, file=sys.stdout)
    print(f"---- seed {result.seed}: {result.name}: {violation}")
    print(f"---- replay it with: python -m tests.sim --seed {result.seed} -v", flush=True)


if __name__ == "__main__":
    sys.exit(main())
