"""
Measure how much SwanLab and trackio slow down a training: python -m tests.trackers FOLDER ROWS

It logs rows to both and prints how many seconds the start, the slowest row and the end took.
"""
import json
import sys
import time

import track


def main(folder, rows):
    took = {}

    def timed(name, call):
        begin = time.monotonic()
        found = call()
        took[name] = max(took.get(name, 0), time.monotonic() - begin)
        return found

    run = {"id": "run-ab12", "project": "llamac", "name": "a run", "tags": ["t"], "notes": "n"}
    session = track.Session(folder, {"lr": 0.1, "data": "x"}, run)
    tracker = timed("start", lambda: track.make_tracker(session, ["swanlab", "trackio"]))
    for i in range(int(rows)):
        row = {"iter": i, "tokens": 100 * i, "loss/train": 3 / (i + 1), "lr": 1e-30,
               "grad/norm": 0.1 + 0.2}
        if i % 10 == 0:
            row |= {"samples": [["once", "greedy", f"upon {i} <b>"]],
                    "logits/histogram": {"counts": [1, 2], "edges": [0.0, 1.0, 2.0]}}
        timed("row", lambda: tracker.log(row))
        time.sleep(0.002)
    timed("end", tracker.finish)
    print(json.dumps(took))


if __name__ == "__main__":
    main(*sys.argv[1:])
