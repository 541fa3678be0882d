"""
Compare the thread pool of an earlier commit with that of the working tree.

    python bench/thread_pool.py --before=COMMIT

Prints three tables. The first two come from bench/simulated_pool.c, which runs both pools on
simulated cores, so they are the same on every machine: how often cache lines move in one step, and
how much longer a step takes than with an ideal division of the work if some cores are slow. The
third is measured on this machine with bench/empty_steps.c, in turns: the time of an empty step.
"""
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from configurator import configure

before = "e315804"                # commit of the earlier pool
folder = "cache/bench/pool"       # folder for the compiled programs
threads = "2"                     # numbers of threads to measure, separated by commas
pairs = 9                         # number of measurements of each pool; 0: only simulate
lists = 2000                      # lists of 100 steps in each measurement
compiler = "cc"

FILES = ("thread_pool.c", "thread_pool.h")
TEAMS = (2, 4, 8, 16, 32, 64)
SPREAD = 200  # max delay of a worker in the first table, in nanoseconds
# (workers, slow workers among them, factor by which an item takes longer on a slow worker)
SLOW = ((2, 1, 1.1), (2, 1, 2), (2, 1, 3), (4, 2, 2), (8, 4, 2), (8, 4, 3), (16, 8, 2), (8, 1, 2))
ITEMS, ITEM_NS = 16, 4000  # second table: items per worker, and nanoseconds per item


def build(source, pool, name):
    """Compile a program of bench/ with the pool in a folder, and return the program's path."""
    program = Path(folder, name)
    # The folder of the earlier pool lacks kernels.h, so include that of the working tree.
    include = ["-I", "runtime/cpu", "-I", "runtime"]
    definition = f'-DPOOL="{Path(pool).resolve()}/thread_pool.c"'
    subprocess.run([compiler, "-std=gnu11", "-O3", *include, definition, f"bench/{source}", "-o",
                    program, "-pthread"], cwd=ROOT, check=True)
    return ROOT / program


def extract(commit):
    """Write the pool of a commit to a folder, and return the folder."""
    # Use a subfolder, because the files include "../os.h".
    target = ROOT / folder / "before" / "cpu"
    target.mkdir(parents=True, exist_ok=True)
    for name, path in [(name, f"runtime/cpu/{name}") for name in FILES] + [
            (f"../{name}", f"runtime/{name}") for name in ("os.h", "bytes.h")]:
        text = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, check=True,
                              capture_output=True).stdout
        (target / name).write_bytes(text)
    return target


def numbers(program, *args):
    """Run a program and return the numbers that it prints."""
    command = [str(program), *map(str, args)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(word) for word in done.stdout.split()]


def print_moves(simulated):
    print(f"Cache lines that move in a step; workers are late by up to {SPREAD} ns\n")
    print(f"{'workers':>7} {'before':>8} {'now':>8}   {'ns before':>9} {'ns now':>7}")
    for n in TEAMS:
        old, new = (numbers(program, n, 16 * n, 1000, 0, 1, SPREAD) for program in simulated)
        print(f"{n:7} {old[0]:8.1f} {new[0]:8.1f}   {old[2]:9.0f} {new[2]:7.0f}")


def print_slow_cores(simulated):
    print(f"\nMicroseconds of a step beyond the ideal; {ITEMS} items of {ITEM_NS / 1000:g} us per "
          "worker\n")
    print(f"{'workers':>7} {'slow':>5} {'slowness':>8} {'ideal':>7} {'before':>8} {'now':>8}")
    for n, slow, slowness in SLOW:
        old, new = (numbers(program, n, ITEMS * n, ITEM_NS, slow, slowness, 0)[2] / 1000
                    for program in simulated)
        ideal = ITEMS * n * ITEM_NS / 1000 / (n - slow + slow / slowness)
        print(f"{n:7} {slow:5} {slowness:8g} {ideal:7.1f} {old:8.1f} {new:8.1f}")


def print_measured(programs, n):
    results = {program: [] for program in programs}
    for i in range(pairs):
        for program in programs if i % 2 == 0 else programs[::-1]:
            results[program].append(numbers(program, n, lists))
    print(f"\nNanoseconds of a step without work on this machine, {n} threads, {pairs} pairs\n")
    print(f"{'':20} {'before':>8} {'now':>8} {'ratio of pairs':>15}")
    for column, title in enumerate(("10th percentile", "median")):
        old, new = ([row[column] for row in results[program]] for program in programs)
        ratio = median(b / a for a, b in zip(old, new))
        print(f"{title:20} {median(old):8.0f} {median(new):8.0f} {ratio:15.2f}")


def main():
    configure(globals())
    pools = [extract(before), ROOT / "runtime/cpu"]
    names = ("before", "now")
    simulated = [build("simulated_pool.c", pool, f"simulated_{name}")
                 for pool, name in zip(pools, names)]
    print_moves(simulated)
    print_slow_cores(simulated)
    if pairs:
        measured = [build("empty_steps.c", pool, f"empty_{name}")
                    for pool, name in zip(pools, names)]
        for n in threads.split(","):
            print_measured(measured, int(n))


if __name__ == "__main__":
    main()
