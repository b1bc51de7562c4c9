"""How fast pictures are served: shared steps, one at a time, batches of whole requests, and plain Diffusers.

    python benchmarks/serve_speed.py --workload sd15-512 --out results [--mixed] [--seconds 4] [--turns 2]

Each way is a server of its own (benchmarks/serve_ways.py), the fourth a FastAPI app around the stock pipeline; the same
clients ask all of them over HTTP, and look at every picture. Weights are random (speed alone), and so are the texts'
embeddings: text encoders are left out. All servers are started first, then they are measured in turns, one at a time:

- At its limit: clients ask again as soon as they are answered, twice as many as the server draws at once, so that one
  always waits. Counted are the pictures until the last answer.
- Shared steps and whole requests get the same requests at the same random moments, at 0.8 of what shared steps manage;
  latencies are taken from when a request was due.

With `--mixed` the same follows for these two with requests for 40, 60, 80 or 100% of the steps, with one guidance or
another: whole requests are then batched with those that ask for the same. `--tiny` tries all of it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import diffusers
import fastapi
import numpy as np
import torch
import uvicorn
from serve_ways import ALONE, DEVICE, MODEL, SHARED, STOCK, WAYS, WHOLE

import rocm_sd
from rocm_sd.bench.serving import ANSWERED, Setting, percentile
from rocm_sd.bench.serving_http import Client, seen, wait_until_ready
from rocm_sd.bench.serving_load import arrivals, asked
from rocm_sd.bench.workloads import WORKLOADS
from rocm_sd.engine import calibration, graphs_wanted
from rocm_sd.files import write_text
from rocm_sd.measuring import interval

TINY_SIDE, TINY_STEPS = 64, 3
BATCHED = (SHARED, WHOLE)
# What was asked of the first against the second, by the workload: at their limit, how many times as many pictures.
ASKED = {(SHARED, STOCK): 4.0, (SHARED, ALONE): {"sd15-512": 3.0, "sdxl-mlperf": 1.3}, (SHARED, WHOLE): None}
ASKED_OF_P95 = 0.5
STRETCHES, DRAWS, SEED = 20, 2000, 20260101


class Server:
    """One way, in a process of its own."""

    def __init__(self, way, options, workload):
        self.way = way
        command = [sys.executable, str(Path(__file__).with_name("serve_ways.py")), way, workload]
        command += ["--in-flight", str(options.in_flight), *(["--tiny"] if options.tiny else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.client = Client(self._process.stdout.readline().strip())
        self.clients = 2 * (options.in_flight if way in BATCHED else 1)

    def wait(self):
        wait_until_ready(
            self.client, lambda: None if self._process.poll() is None else f"exit code {self._process.returncode}"
        )

    def close(self):
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Requests:
    """The same ones every time, by their numbers."""

    setting: Setting
    guidance: float
    mixed: bool

    def __getitem__(self, number):
        setting, chance = self.setting, random.Random(number)  # noqa: S311 -- nothing is kept secret by it
        steps, guidance = setting.steps, self.guidance
        if self.mixed:
            steps = max(1, round(steps * chance.choice((0.4, 0.6, 0.8, 1.0))))
            guidance = chance.choice((guidance, 0.8 * guidance))
        return {
            "model": MODEL, "prompt": f"a picture {number}", "n": 1, "response_format": "b64_json",
            "output_format": "png", "size": f"{setting.width}x{setting.height}", "steps": steps, "guidance": guidance,
            "seed": number,
        }  # fmt: skip

    def answer(self, server, number):
        """Seconds; a request that is not answered by its picture ends the run."""
        found = asked(server.client, self.setting, self[number])
        if found.outcome != ANSWERED:
            raise SystemExit(f"{server.way}: request {number} was {found.outcome} ({found.why})")
        return found.seconds


def in_threads(calls):
    """All at once; raises the first error."""
    errors = []

    def run(call):
        try:
            call()
        except BaseException as error:  # noqa: BLE001 -- it is raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def at_its_limit(server, requests, seconds):
    """Pictures a second."""
    began, numbers, lock, ends = time.perf_counter(), iter(range(10**9)), threading.Lock(), []

    def client():
        while time.perf_counter() < began + seconds:
            with lock:
                number = next(numbers)
            requests.answer(server, number)
            ends.append(time.perf_counter())

    in_threads([client] * server.clients)
    return len(ends) / (max(ends) - began)


def at_a_rate(server, requests, rate, seconds, turn):
    """Latencies of requests that come at random moments, in the order in which they were due."""
    due = arrivals(rate, seconds, turn)
    took, began = [0.0] * len(due), time.perf_counter()

    def one(number):
        time.sleep(max(0.0, began + due[number] - time.perf_counter()))
        requests.answer(server, 1000 * turn + number)
        took[number] = round(time.perf_counter() - began - due[number], 4)

    in_threads([lambda number=number: one(number) for number in range(len(due))])
    return took


def against(ours, theirs, turns):
    """How many times as many pictures a second, and the interval of it."""
    each = [[1 / rate for rate in turns[way]] for way in (ours, theirs)]
    low, high = interval(*each)
    ratio = float(np.median(turns[ours]) / np.median(turns[theirs]))
    return {"ratio": round(ratio, 3), "low": round(low, 3), "high": round(high, 3)}


def p95_against(ours, theirs):
    """The ratio of the 95th percentiles, 95%: the requests are the same ones, and stretches of them are drawn.

    Requests that wait in one queue are late together: one by one they would claim more than they know.
    """
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    stretches = np.array_split(np.arange(len(ours)), min(STRETCHES, len(ours)))
    chosen = np.random.default_rng(SEED).integers(len(stretches), size=(DRAWS, len(stretches)))
    picks = [np.concatenate([stretches[place] for place in places]) for places in chosen]
    drawn = [percentile(ours[pick], 0.95) / percentile(theirs[pick], 0.95) for pick in picks]
    low, high = np.quantile(drawn, (0.025, 0.975))
    ratio = percentile(ours, 0.95) / percentile(theirs, 0.95)
    return {"ratio": round(ratio, 3), "low": round(float(low), 3), "high": round(float(high), 3)}


def at_their_limit(servers, requests, options, asked_for):
    """All of them, in turns."""
    found, rates = {}, {way: [] for way in servers}
    before = {way: seen(server.client) for way, server in servers.items()}
    for turn in range(options.turns):
        for way in list(servers) if turn % 2 else reversed(servers):
            rates[way].append(round(at_its_limit(servers[way], requests, options.seconds), 4))
            print(f"turn {turn + 1}, at its limit, {way}: {rates[way][-1]:.3f} pictures a second", flush=True)
    for way, server in servers.items():
        ours = {"pictures a second": float(np.median(rates[way])), "by turns": rates[way], "clients": server.clients}
        found[way] = ours | together(before[way], seen(server.client))
    for (ours, theirs), wanted in asked_for.items():
        if {ours, theirs} <= servers.keys():
            said = against(ours, theirs, rates)
            found[f"{ours} / {theirs}"] = said | ({} if wanted is None else {"asked": wanted})
    return found


def at_one_rate(servers, requests, rate, options):
    """Those that batch, in turns."""
    took = {way: [] for way in BATCHED if way in servers}
    for turn in range(options.turns):
        for way in list(took) if turn % 2 else reversed(took):
            took[way] += at_a_rate(servers[way], requests, rate, 2.5 * options.seconds, turn + 1)
            print(f"turn {turn + 1}, at {rate:.3f} requests a second, {way}", flush=True)
    found = {"rate": round(rate, 4)}
    for way, latencies in took.items():
        shares = {f"p{100 * share:.0f}": percentile(latencies, share) for share in (0.5, 0.9, 0.95, 0.99)}
        found[way] = shares | {"count": len(latencies), "seconds": latencies}
    if len(took) > 1:
        found[f"p95 of {SHARED} / {WHOLE}"] = p95_against(took[SHARED], took[WHOLE]) | {"asked": ASKED_OF_P95}
    return found


def measured(servers, requests, options, asked_for):
    """One kind of requests."""
    found = {"at the limit": at_their_limit(servers, requests, options, asked_for)}
    if SHARED in servers:
        rate = 0.8 * found["at the limit"][SHARED]["pictures a second"]
        found["at 0.8"] = at_one_rate(servers, requests, rate, options)
    return found


def together(before, after):
    """How many pictures shared a call, as the server counted; plain Diffusers has one."""
    if before.batches is None or after.batches is None:
        return {}
    calls = after.batches - before.batches
    return {"pictures a call": round((after.batch_pictures - before.batch_pictures) / calls, 3)} if calls else {}


def run(name, options):
    recipe = WORKLOADS[name]
    side, steps = (TINY_SIDE, TINY_STEPS) if options.tiny else (recipe.side, recipe.steps)
    setting = Setting(1.0, "0.8x", options.seconds, steps, side, side, MODEL, 1)
    flags = "".join(f" --{flag}" for flag in ("mixed", "tiny") if getattr(options, flag))
    flags += "".join(f' --way "{way}"' for way in options.way or ())
    record = {
        "command": f"python benchmarks/serve_speed.py --workload {name} --seconds {options.seconds:g} "
        f"--turns {options.turns} --in-flight {options.in_flight}{flags}",
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU", "workload": name, "steps": steps,
        "size": f"{side}x{side}", "in flight": options.in_flight, "weights": "random: speed alone",
        "interval": "95%" if options.turns >= 8 else "at the limit, the extremes that the turns allow; of p95, 95%",
        "rocm_sd": rocm_sd.__version__, "torch": torch.__version__, "diffusers": diffusers.__version__,
        "fastapi": fastapi.__version__, "uvicorn": uvicorn.__version__, "python": platform.python_version(),
    }  # fmt: skip
    file = options.out / f"serve-{name}{'-tiny' if options.tiny else ''}.json"
    asked_for = {pair: wanted.get(name) if isinstance(wanted, dict) else wanted for pair, wanted in ASKED.items()}
    with ExitStack() as stack:
        began, servers = time.perf_counter(), {}
        for way in options.way or (SHARED, ALONE, WHOLE, STOCK):
            servers[way] = Server(way, options, name)
            stack.callback(servers[way].close)
            if calibration.wanted(DEVICE, graphs=graphs_wanted(DEVICE)):
                # A card is measured by one of them, while it does nothing else.
                servers[way].wait()
        for server in servers.values():
            server.wait()
        record["ready after"] = round(time.perf_counter() - began, 1)
        print(f"{name}: all ready after {record['ready after']} s", flush=True)
        record["requests alike"] = measured(servers, Requests(setting, recipe.guidance, False), options, asked_for)
        write_text(file, json.dumps(record, indent=1) + "\n")
        if options.mixed:
            two = {way: servers[way] for way in BATCHED if way in servers}
            record["requests unlike"] = measured(two, Requests(setting, recipe.guidance, True), options, asked_for)
        record["seconds in all"] = round(time.perf_counter() - began, 1)
    write_text(file, json.dumps(record, indent=1) + "\n")
    for kind in ("requests alike", "requests unlike"):
        for part in record.get(kind, {}).values():
            for what, said in part.items():
                if isinstance(said, dict) and "ratio" in said:
                    words = f", asked {said['asked']:g}" if said.get("asked") else ""
                    print(f"{kind}: {what} {said['ratio']:.3f} ({said['low']:.3f} to {said['high']:.3f}){words}")
    print(f"wrote {file} after {record['seconds in all']} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workload", action="append", help="sd15-512 and sdxl-mlperf if none is given")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn at the limit; at a rate 2.5 times")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--mixed", action="store_true", help="then several numbers of steps, and two of guidance")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    for name in options.workload or ("sd15-512", "sdxl-mlperf"):
        run(name, options)


if __name__ == "__main__":
    main()
